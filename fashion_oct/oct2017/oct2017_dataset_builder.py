"""The TensorFlow Datasets builder of OCT2017, from the folder as unpacked.

Every file is kept byte for byte. The records of a split lie in a fixed random order, so that a reader needs no large
shuffle buffer and a slice such as train[:10%] holds all classes. The metadata say where each image of the folder lies:
per split, in the order of `oct_folder.list_split`, the lists file_name, label, patient and record, the record's
position; and bad, the file and the reason of each image that was left out.
"""

import os
import pathlib
import sys
import tempfile

import numpy as np
import tensorflow_datasets as tfds

from fashion_oct import oct_folder
from fashion_oct.errors import InputError


class Builder(tfds.core.GeneratorBasedBuilder):
    """Builds the splits that the folder has."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "The first one."}  # noqa: RUF012 -- TensorFlow Datasets reads it from the class
    MANUAL_DOWNLOAD_INSTRUCTIONS = (
        "manual_dir must be the folder OCT2017, which holds train and test, or one that holds it. "
        + oct_folder.WAYS_TO_GET_THE_DATA.replace("as --data_dir", "as manual_dir")
    )

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(
                {
                    # decodes to grey; the files stay as they are, those of colour scans too
                    "image": tfds.features.Image(shape=(None, None, 1), encoding_format="jpeg"),
                    "label": tfds.features.ClassLabel(),  # its names are the folders
                    "patient": tfds.features.Text(),
                    "file_name": tfds.features.Text(),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://data.mendeley.com/datasets/rscbjbr9sj/2",
            license="CC BY 4.0",
            disable_shuffling=True,  # `_generate_examples` shuffles, and tells the order
            metadata=tfds.core.MetadataDict(),
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
        root = oct_folder.find_root(dl_manager.manual_dir)
        folders = {path.name.strip().lower() for path in root.iterdir() if path.is_dir()}
        splits = {name: oct_folder.list_split(root, name) for name in oct_folder.SPLITS if name in folders}
        self.info.features["label"].names = list(oct_folder.class_folders(root))
        for name, split in splits.items():
            self.info.metadata[name] = {
                "file_name": [os.path.basename(path) for path in split.paths],
                "label": split.labels.tolist(),
                "patient": split.patients,
                "record": np.random.default_rng(2018).permutation(len(split.paths)).tolist(),
                "bad": split.bad,
            }
        return {name: self._generate_examples(name, split.paths) for name, split in splits.items()}

    def _generate_examples(self, name: str, paths: list[str]):
        columns = self.info.metadata[name]
        for index, record in enumerate(columns["record"]):
            # Keys of 128 bits, evenly spread: TensorFlow Datasets sorts them in 1,000 parts of the range, one at a time
            # in memory. Keys 0, 1, ... would all be in the first part.
            yield (
                (record << 128) // len(paths),
                {
                    "image": paths[index],
                    **{feature: columns[feature][index] for feature in ("label", "patient", "file_name")},
                },
            )


def build(data_dir: str | os.PathLike, target: str | os.PathLike) -> str:
    """Builds the dataset of an OCT2017 folder as ArrayRecord files, which can be read in any order.

    Nothing is left behind where it fails: TensorFlow Datasets writes into a folder beside the result and renames it.

    Args:
      data_dir: the OCT2017 folder, or one that holds it.
      target: the folder for TensorFlow Datasets; the result lies in oct2017/1.0.0 in it.

    Returns:
      What was built, in words.

    Raises:
      InputError: the data are missing or damaged, or the target is in use or inside the data folder.
    """
    root = oct_folder.find_root(data_dir)
    builder = Builder(data_dir=target, file_format="array_record")
    if os.path.lexists(builder.data_dir):
        raise InputError(f"--shards={target} holds {builder.data_dir} already; choose another folder or remove it")
    if pathlib.Path(target).resolve().is_relative_to(root.resolve()):
        raise InputError(f"--shards={target} lies inside the data folder, which is never written to; choose another")
    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    config = tfds.download.DownloadConfig(manual_dir=root)
    with tempfile.TemporaryDirectory() as downloads:  # none; by default an empty folder in the home folder
        builder.download_and_prepare(download_config=config, download_dir=downloads)
    counts = ", ".join(f"{name} {split.num_examples:,}" for name, split in builder.info.splits.items())
    num_bad = sum(len(builder.info.metadata[name]["bad"]) for name in builder.info.splits)
    return f"{counts} images in {builder.data_dir}" + (f"; {num_bad:,} that cannot be used left out" if num_bad else "")
