"""differences"""
