"""Model families: what a Hugging Face checkpoint says about a model, as data, and the decoder built from it."""
