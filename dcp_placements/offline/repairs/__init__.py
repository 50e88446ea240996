"""repairs"""
