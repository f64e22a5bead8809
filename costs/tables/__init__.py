"""Facts: devices, prices, model shapes, engines, measured rates, with their readers.

The lowest package: it imports no other.
"""
