"""The gRPC server: generation, tokenization and models on one listener, operation on another."""
