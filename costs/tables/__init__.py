"""Facts: devices, prices, model shapes, engines, measured rates, with their readers.

The lowest room: it imports no other.
"""
