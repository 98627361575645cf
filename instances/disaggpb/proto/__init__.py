"""The messages of the workers, and the code generated from them.

Made with `python -m grpc_tools.protoc -I. --python_out=. --mypy_out=. instances/disaggpb/proto/disagg.proto` and then
`sed -i 's/_descriptor_pool.Default()/_descriptor_pool.DescriptorPool()/' instances/disaggpb/proto/disagg_pb2.py`.
A pool of its own lets a client in the same process have messages of the same names.
"""
