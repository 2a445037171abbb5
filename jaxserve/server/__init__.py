"""Servers: gRPC streaming and OpenAI-compatible HTTP in front of an engine in a process of its own.

A request's way: a surface (``http_api``, ``grpc_api``) makes an ``EngineRequest`` of it, ``Frontend`` admits it,
``EngineClient`` sends it to the engine process (``engine_process``), whose outputs come back as ``RequestOutput``s.
Nothing in the front end imports JAX, and nothing that crosses a process boundary is anything but protobuf.
"""
