"""bind"""
