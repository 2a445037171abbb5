"""The embedded demo model and the four tasks it answers.

`jaxserve/demo/model` is a Hugging Face directory (Llama architecture) made by `scripts/train_demo_model.py`;
`jaxserve.demo.tasks` makes the questions, keeps some out of training and checks the answers.
"""

from pathlib import Path

MODEL_DIRECTORY: Path = Path(__file__).parent / "model"
"""Where the demo checkpoint lies, inside the installed package."""
