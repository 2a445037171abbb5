"""Checkpoints: safetensors, torch `.bin`, Orbax and GGUF, read by byte range straight into sharded JAX arrays.

This package imports nothing else of the repository and is useful alone:

    with open_checkpoint(resolve_model("Qwen/Qwen3-0.6B")) as reader:
        recipe = whole("model.norm.weight", reader.tensors["model.norm.weight"].shape)
        array = load_array(reader, recipe, "bfloat16", sharding)
"""

from checkpoints.choice import LOAD_FORMATS as LOAD_FORMATS
from checkpoints.choice import Listing as Listing
from checkpoints.choice import Listings as Listings
from checkpoints.choice import open_checkpoint as open_checkpoint
from checkpoints.convert import convert as convert
from checkpoints.errors import CheckpointError as CheckpointError
from checkpoints.gguf_choice import is_gguf as is_gguf
from checkpoints.hub import resolve_model as resolve_model
from checkpoints.loader import Stored as Stored
from checkpoints.loader import load_array as load_array
from checkpoints.loader import load_arrays as load_arrays
from checkpoints.loader import read_shard as read_shard
from checkpoints.orbax_io import save_orbax as save_orbax
from checkpoints.progress import progress_bar as progress_bar
from checkpoints.reader import CheckpointReader as CheckpointReader
from checkpoints.reader import read_index as read_index
from checkpoints.recipe import Piece as Piece
from checkpoints.recipe import TensorRecipe as TensorRecipe
from checkpoints.recipe import whole as whole
from checkpoints.recipe_check import check_recipes as check_recipes
from checkpoints.safetensors_writer import save_safetensors as save_safetensors
from checkpoints.tensor_info import Bounds as Bounds
from checkpoints.tensor_info import Index as Index
from checkpoints.tensor_info import TensorInfo as TensorInfo
from checkpoints.tensor_info import index_bounds as index_bounds
