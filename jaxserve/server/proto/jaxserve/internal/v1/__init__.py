"""Front end and engine process; generated."""
