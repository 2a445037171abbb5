"""The embedded demo model and its four tasks.

`jaxserve/demo/model` is a Hugging Face directory (Llama architecture) made by `scripts/train_demo_model.py`;
`jaxserve.demo.tasks` generates the questions, holds some out of training and checks the answers.
"""

from pathlib import Path

MODEL_DIRECTORY: Path = Path(__file__).parent / "model"
"""Directory of the demo checkpoint in the installed package."""
