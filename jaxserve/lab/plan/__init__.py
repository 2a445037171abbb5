"""Memory and time of a model on devices that need not be here."""
