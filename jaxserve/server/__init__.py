"""Servers: gRPC and OpenAI-compatible HTTP in front of an engine in a process of its own.

The HTTP and gRPC APIs (``http_api``, ``grpc_api``) turn a request into a ``Request``, ``Ledger`` admits it, and
``Frontend`` runs it: ``EngineClient`` renders its template and sends it to the engine process (``engine_process``),
whose outputs come back as ``RequestOutput``. Nothing in the front end imports JAX; the processes exchange MessagePack
only.
"""
