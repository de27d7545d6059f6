"""Images, class orders and task streams."""

from morecl.data.benchmarks import Recipe, build_stream, check_stream, load_recipe, recipe_names
from morecl.data.datasets import DATASETS, load_dataset, resolve_data_root
from morecl.data.folder import SkippedImagesWarning, StreamedImagesWarning, UnlabelledImagesWarning
from morecl.data.orders import ORDERS, class_order
from morecl.data.stream import Dataset, Division, Images, Labels, Task, TaskStream

__all__ = [
    "DATASETS",
    "ORDERS",
    "Dataset",
    "Division",
    "Images",
    "Labels",
    "Recipe",
    "SkippedImagesWarning",
    "StreamedImagesWarning",
    "Task",
    "TaskStream",
    "UnlabelledImagesWarning",
    "build_stream",
    "check_stream",
    "class_order",
    "load_dataset",
    "load_recipe",
    "recipe_names",
    "resolve_data_root",
]
