"""Compiled protobuf messages, and the `.proto` files that they are made of.

`*_pb2.py` and `*_pb2.pyi` are made by `python -m grpc_tools.protoc`; a test makes them again and compares. The packages
that the files name are our own, not those of the engines: a package name is not on the wire, and messages of the same
name may exist only once in a process, which a simulated instance in the same process would need for its own.
"""
