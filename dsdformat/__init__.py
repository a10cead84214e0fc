"""A checkpoint format for training and serving: safetensors files and one sealed manifest.

`open` reads, `create` writes, `verify` checks every byte. Importing this package loads neither
torch nor numpy; `dsdformat.numpy` and `dsdformat.torch` save and load whole states.
"""

from __future__ import annotations

from dsdformat.boxes import Box
from dsdformat.entries import TensorEntry
from dsdformat.errors import (
    ArgumentError,
    ChecksumError,
    ConvertError,
    DependencyError,
    DistributedError,
    DsdDeprecationWarning,
    DsdError,
    DsdPrecisionWarning,
    DsdUnstableWarning,
    EntryNotFoundError,
    FormatError,
    IncompleteError,
    LayoutError,
    LimitError,
    ManifestError,
    MismatchError,
    NotACheckpointError,
    Problem,
    RankDisagreementError,
    SignatureError,
    StorageError,
    TimeLimitError,
    UnsupportedValueError,
    VersionError,
)
from dsdformat.folders import create, latest, open, sign, verify
from dsdformat.format.frame import FORMAT_VERSION
from dsdformat.format.manifest import Mesh
from dsdformat.format.values import Named, Scalar, Size
from dsdformat.reader import Checkpoint
from dsdformat.sources import TensorSource
from dsdformat.verify import Report
from dsdformat.writer import PartWriter, Writer

__version__ = "0.1.0"

__all__ = [
    "FORMAT_VERSION",
    "ArgumentError",
    "Box",
    "Checkpoint",
    "ChecksumError",
    "ConvertError",
    "DependencyError",
    "DistributedError",
    "DsdDeprecationWarning",
    "DsdError",
    "DsdPrecisionWarning",
    "DsdUnstableWarning",
    "EntryNotFoundError",
    "FormatError",
    "IncompleteError",
    "LayoutError",
    "LimitError",
    "ManifestError",
    "Mesh",
    "MismatchError",
    "Named",
    "NotACheckpointError",
    "PartWriter",
    "Problem",
    "RankDisagreementError",
    "Report",
    "Scalar",
    "SignatureError",
    "Size",
    "StorageError",
    "TensorEntry",
    "TensorSource",
    "TimeLimitError",
    "UnsupportedValueError",
    "VersionError",
    "Writer",
    "__version__",
    "create",
    "latest",
    "open",
    "sign",
    "verify",
]
