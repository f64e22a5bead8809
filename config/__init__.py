"""Schema of params.yaml, the records that the halves of the project exchange, and the error
tree.
"""
