"""The gRPC server: text generation, tokenizer and models on one listener, operation on another."""
