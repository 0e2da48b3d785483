"""Audits an OCT2017 folder; on request downloads it first, or writes a split by patient or a faster copy.

    python -m fashion_oct.prepare --data_dir=OCT2017
    python -m fashion_oct.prepare --data_dir=OCT2017 --resplit=0.2 --out=OCT2017_by_patient
    python -m fashion_oct.prepare --data_dir=OCT2017 --shards=OCT2017_shards
    python -m fashion_oct.prepare --data_dir=OCT2017 --download

Prints what it found and writes it as audit.json and manifest.csv (one row an image) into --out. Expect a few minutes
for the 84,484 images on two cores, under one with --nodecode. The data folder itself is never written to. With --shards
it packs the images into a few large files instead, for storage that is slow with many small ones: `train` takes both.
"""

from typing import Any

from absl import flags

from fashion_oct import oct_folder, options
from fashion_oct.errors import InputError


def define_flags(flag_values: flags.FlagValues) -> None:
    """Defines the flags of this command."""
    where: dict[str, Any] = {"flag_values": flag_values}
    flags.DEFINE_string("data_dir", None, "the OCT2017 folder (holds train and test), or one that holds it", **where)
    flags.DEFINE_bool("decode", True, "decode images: finds those that do not decode, or are pixel-identical", **where)
    flags.DEFINE_float("resplit", None, "write a split by patient to --out; this share of each class is test", **where)
    flags.DEFINE_string("out", None, "where to write; with --resplit a new folder, else default oct_audit", **where)
    flags.DEFINE_string("shards", None, "write a copy in a few large files into this folder, no audit", **where)
    flags.DEFINE_integer("seed", 0, "another seed, another split", **where)
    flags.DEFINE_bool("download", False, "fetch the archive into --data_dir with the kaggle client first", **where)


def run(flag_values: flags.FlagValues, arguments: list[str]) -> None:
    """Downloads, then packs, or audits and splits."""
    data_dir, fraction, out = flag_values.data_dir, flag_values.resplit, flag_values.out
    shards = flag_values.shards
    if data_dir is None or arguments:
        raise InputError(f"got {arguments or 'no --data_dir'}; pass the OCT2017 folder as --data_dir=FOLDER")
    if fraction is not None and (out is None or not flag_values.decode):
        raise InputError(
            f"--resplit={fraction} needs --out=FOLDER, and --decode to keep pixel-identical images together"
        )
    if None not in (shards, out):
        raise InputError(f"got --shards={shards} and --out={out}; pass them to two commands")
    if flag_values.download:
        oct_folder.download(data_dir)
    if shards is not None:
        import fashion_oct.oct2017.oct2017_dataset_builder as oct2017  # with TensorFlow, which nothing else needs here

        print(f"Written: {oct2017.build(data_dir, shards)}")
        return
    if fraction is not None:
        oct_folder.check_resplit(oct_folder.find_root(data_dir), out, fraction=fraction)
    audit = oct_folder.scan(data_dir, decode=flag_values.decode)
    print(oct_folder.summary(audit))
    if fraction is None:
        oct_folder.write_audit(audit, out or "oct_audit")
    else:
        new = oct_folder.resplit(audit, out, fraction=fraction, seed=flag_values.seed)
        print(f"\nThe new split\n{oct_folder.summary(new)}")
    print(f"Written: audit.json and manifest.csv in {out or 'oct_audit'}")


def main() -> None:
    options.run_command(run, define_flags, usage=__doc__)


if __name__ == "__main__":
    main()
