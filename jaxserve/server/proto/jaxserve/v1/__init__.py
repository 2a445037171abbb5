"""The public protocol; generated."""
