"""The engine: admits requests, runs their steps and delivers their outputs."""
