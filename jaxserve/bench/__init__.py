"""``jaxserve bench``: latency, throughput and start-up, with vLLM's output lines; and the demo model's accuracy."""
