"""What users and the engine exchange: configuration, requests and their parameters, outputs, errors."""
