"""Check a manifest before anything is read or allocated because of it."""

from __future__ import annotations

import base64
import functools
import itertools
import math
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from cloudckpt.format.model import (
    ITEMSIZE_BYTES,
    REFERENCES_VERSION,
    Chunk,
    Manifest,
    StoredObject,
    StoredTensor,
    StoredValue,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Integers: TypeAlias = npt.NDArray[np.int64]

MAX_NDIM = 64  # torch's own limit
MAX_BYTES = 2**63 - 1
_MIN_TILE_BYTES = 4096
_MAX_TILE_BYTES = 2**30
_MAX_KEY_LENGTH = 1024
_MAX_EMPTY_PLACES = 1_000_000  # of lists: they cost nothing, and no state dict has as many
_MIN_CHUNKS_OF_ARRAYS = 16  # for fewer, making arrays takes longer than looking at each
_MAX_SORTED_DIMS = 3  # of a million boxes, sorting more corners takes more memory than a count of them
_OBJECT_INDEX, _BEGIN, _END = attrgetter("object_index"), attrgetter("begin"), attrgetter("end")
_PRIME = 2**127 - 1
_NUM_KEY_SEGMENTS = 3  # at least: data/<attempt>/<name>

_Path = Sequence[Any]  # of strings, integers and lists of one key
_Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and lengths."""


def find_problems(manifest: Manifest) -> list[str]:
    """Return every contradiction, each with its place; empty for a manifest that can be relied on.

    Afterwards: keys stay under ``data/`` of the checkpoint, or of a folder beside it; every byte range is within its
    object, is aligned to its element size and has the length that dtype and shape demand; the chunks of a tensor fill
    it, each element once.
    """
    problems = find_object_problems(manifest.objects, tile_bytes=manifest.tile_bytes, world_size=manifest.world_size)
    if manifest.version < REFERENCES_VERSION and any(stored.folder for stored in manifest.objects):
        problems.append(f"an object has a folder, which version {manifest.version[0]} does not know")
    if problems:
        return problems  # ranges cannot be judged against objects that are wrong themselves
    import numpy as np

    object_sizes_bytes = np.array([stored.size for stored in manifest.objects], dtype=np.int64)
    for fqn, tensor in manifest.tensors.items():
        if not _is_one_sound_chunk(tensor, manifest.objects):
            texts = _tensor_problems(tensor, manifest.objects, object_sizes_bytes)
            problems.extend(f"tensor {fqn!r}: {text}" for text in texts)
    for fqn, value in manifest.values.items():
        problems.extend(f"value {fqn!r}: {text}" for text in _range_problems(value, manifest.objects))
    problems.extend(find_name_problems(manifest.tensors, manifest.values))
    problems.extend(_nesting_problems(manifest))
    problems.extend(_wrapper_problems(manifest))
    return problems


def find_object_problems(objects: Sequence[StoredObject], *, tile_bytes: int, world_size: int) -> list[str]:
    """Return the contradictions in the objects of a manifest, and in its fields about the whole save."""
    problems = list(_object_problems(objects, tile_bytes))
    if not _MIN_TILE_BYTES <= tile_bytes <= _MAX_TILE_BYTES or tile_bytes % 64:
        problems.append(f"tile_bytes is {tile_bytes}, not a multiple of 64 in [{_MIN_TILE_BYTES}, {_MAX_TILE_BYTES}]")
    if world_size < 1:
        problems.append(f"world_size is {world_size}")
    return problems


def find_name_problems(tensors: Mapping[str, object], values: Mapping[str, object]) -> list[str]:
    """Return a problem for each name of a tensor that a value has, too."""
    return [f"{fqn!r} is a tensor and a value at once" for fqn in sorted(tensors.keys() & values.keys())]


def _nesting_problems(manifest: Manifest) -> Iterator[str]:
    """Yield the contradictions in the paths of the entries."""
    nesting, typed = manifest.nesting or {}, manifest.typed_nesting or {}
    for member, by_fqn in (("nesting", nesting), ("typed_nesting", typed)):
        unknown = by_fqn.keys() - manifest.tensors.keys() - manifest.values.keys()
        yield from (f"{member} names {fqn!r}, which is not stored" for fqn in sorted(unknown))
        yield from (f"{member} of {fqn!r} is empty" for fqn, path in by_fqn.items() if not path)
    tuples = [stored_tuple.path for stored_tuple in manifest.tuples]
    if not all(manifest.empty_mappings) or not all(tuples):
        yield "empty_mappings or tuples has an empty path"
    with_keys: list[_Path] = [*typed.values(), *manifest.empty_mappings, *tuples]
    for step in itertools.chain.from_iterable(with_keys):
        if isinstance(step, list) and not (len(step) == 1 and _is_key(step[0])):
            yield f"{step!r:.80} is not the key of a mapping"
    yield from _index_problems([*nesting.values(), *with_keys])


def _wrapper_problems(manifest: Manifest) -> Iterator[str]:
    """Yield the contradictions in the wrappers."""
    for name, wrapper in manifest.wrappers.items():
        if name in manifest.tensors or name in manifest.values:
            yield f"{name!r} is a wrapper, and a tensor or a value at once"
        parts = [f"{name}.{part}" for part in wrapper.tensors]
        if not parts or not all(part in manifest.tensors or part in manifest.wrappers for part in parts):
            yield f"wrapper {name!r} does not have its parts {wrapper.tensors!r:.200}"
        if len(wrapper.shape) > MAX_NDIM or any(not 0 <= length <= MAX_BYTES for length in wrapper.shape):
            yield f"wrapper {name!r}: shape {wrapper.shape!r:.200} is not a shape"
        if len(wrapper.stride) != len(wrapper.shape) or any(not 0 <= step <= MAX_BYTES for step in wrapper.stride):
            yield f"wrapper {name!r}: stride {wrapper.stride!r:.200} does not fit its shape"


def _index_problems(paths: Sequence[_Path]) -> Iterator[str]:
    """Yield indices in paths that are too large: a load makes lists of that length, also for empty containers."""
    at_most = num_steps = 0
    for path in paths:
        num_steps += len(path)
        for step in path:
            if isinstance(step, int):
                at_most += step + 1
                if not 0 <= step < MAX_BYTES:
                    yield f"nesting {path!r:.200} has an index outside [0, {MAX_BYTES})"
                    return
    # A list that several paths share is counted once, but that takes long.
    max_places = num_steps + _MAX_EMPTY_PLACES
    if at_most > max_places and _num_list_places(paths) > max_places:
        yield f"nesting has lists with more than {max_places} places in all for {len(paths)} entries"


def _is_key(key: object) -> bool:
    """Return True if a mapping may have the JSON key `key`: a scalar, or a list of scalars for a Python tuple."""
    return all(
        isinstance(scalar, (str, int, float, type(None))) for scalar in (key if isinstance(key, list) else [key])
    )


def _num_list_places(paths: Iterable[_Path]) -> int:
    lengths: dict[int, int] = {}
    nodes: dict[tuple[int, object], int] = {}
    for path in paths:
        node = 0
        for step in path:
            if isinstance(step, int):
                lengths[node] = max(lengths.get(node, 0), step + 1)
            # As text, a key is what it is in the other member.
            text = step if isinstance(step, (str, int)) else str(step[0] if step else step)
            node = nodes.setdefault((node, text), len(nodes) + 1)
    return sum(lengths.values())


def is_safe_folder(name: str) -> bool:
    """Return True if `name` names a folder beside a checkpoint's own and can name nothing else."""
    return is_safe_key(f"data/{name}/0") and "/" not in name


def is_safe_key(key: str) -> bool:
    """Return True if `key` names an object under a checkpoint's ``data/`` and can name nothing else."""
    segments = key.split("/")
    return (
        len(key) <= _MAX_KEY_LENGTH
        and len(segments) >= _NUM_KEY_SEGMENTS
        and segments[0] == "data"
        and all(segment not in ("", ".", "..") for segment in segments)
        and not any(character in "\\:\0" or not character.isprintable() for character in key)
    )


def num_tiles(size_bytes: int, tile_bytes: int) -> int:
    """Return the number of tiles of an object of `size_bytes`."""
    return -(-size_bytes // tile_bytes)


def _object_problems(objects: Sequence[StoredObject], tile_bytes: int) -> Iterator[str]:
    seen: set[tuple[str, str]] = set()
    for index, stored in enumerate(objects):
        where = f"objects[{index}]"
        if not is_safe_key(stored.key):
            yield f"{where}: key {stored.key!r:.200} is not under data/"
        if stored.folder and not is_safe_folder(stored.folder):
            yield f"{where}: folder {stored.folder!r:.200} cannot be the name of one"
        if (stored.folder, stored.key) in seen:
            yield f"{where}: key {stored.key!r:.200} occurs twice"
        seen.add((stored.folder, stored.key))
        if not 0 <= stored.size <= MAX_BYTES:
            yield f"{where}: size is {stored.size}"
        elif tile_bytes > 0:
            num_values = num_tiles(stored.size, tile_bytes)
            if _num_base64_bytes(stored.crc32c) != 4 * num_values:
                yield f"{where}: does not have one checksum for each of its {num_values} tiles"


def _num_base64_bytes(text: str) -> int:
    """Return the number of bytes that `text` encodes; -1 if it is not base64."""
    try:
        return len(base64.b64decode(text, validate=True))
    except ValueError:
        return -1


def _is_one_sound_chunk(tensor: StoredTensor, objects: Sequence[StoredObject]) -> bool:
    """Return True if one chunk certainly holds the tensor: nearly always. `_tensor_problems` names the problems."""
    shape, num_bytes = tensor.shape, _sound_bytes(tensor.dtype, tensor.shape)
    if len(tensor.chunks) != 1 or tensor.transforms or num_bytes is None or len(tensor.xxh3_128s) > 1:
        return False
    (chunk,) = tensor.chunks
    begin, end = chunk.begin, chunk.end
    return (
        chunk.lengths == shape
        and not any(chunk.offsets)
        and len(chunk.offsets) == len(shape)
        and 0 <= chunk.object_index < len(objects)
        and 0 <= begin <= end <= objects[chunk.object_index].size
        and end - begin == num_bytes
        and begin % ITEMSIZE_BYTES[tensor.dtype] == 0
    )


@functools.lru_cache  # tensors of few shapes make up a model
def _sound_bytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Return the bytes of a tensor; None if there can be no such tensor."""
    if dtype not in ITEMSIZE_BYTES or len(shape) > MAX_NDIM or not all(0 <= length <= MAX_BYTES for length in shape):
        return None
    return math.prod(shape) * ITEMSIZE_BYTES[dtype]


def _tensor_problems(
    tensor: StoredTensor, objects: Sequence[StoredObject], object_sizes_bytes: Integers
) -> Iterator[str]:
    itemsize_bytes = ITEMSIZE_BYTES.get(tensor.dtype)
    if itemsize_bytes is None:
        yield f"dtype {tensor.dtype!r:.80} is unknown"
        return
    if len(tensor.shape) > MAX_NDIM or any(not 0 <= length <= MAX_BYTES for length in tensor.shape):
        yield f"shape {tensor.shape!r:.200} is not a shape"
        return
    if math.prod(tensor.shape) * itemsize_bytes > MAX_BYTES:
        yield f"shape {tensor.shape!r:.200} is too large"
        return
    if len(tensor.xxh3_128s) not in (0, len(tensor.chunks)):
        yield f"has {len(tensor.xxh3_128s)} hashes of {len(tensor.chunks)} chunks"
    if len(tensor.chunks) >= _MIN_CHUNKS_OF_ARRAYS and is_sound(tensor, itemsize_bytes, object_sizes_bytes):
        return
    in_place = True
    for index, chunk in enumerate(tensor.chunks):
        for text in _chunk_problems(chunk, tensor, itemsize_bytes, objects):
            in_place = False
            yield f"chunk {index}: {text}"
    if in_place and not fills_once(((chunk.offsets, chunk.lengths) for chunk in tensor.chunks), tensor.shape):
        volume = sum(math.prod(chunk.lengths) for chunk in tensor.chunks)
        yield f"its chunks do not fill it, each element once: they hold {volume} elements of {math.prod(tensor.shape)}"


def _chunk_problems(
    chunk: Chunk, tensor: StoredTensor, itemsize_bytes: int, objects: Sequence[StoredObject]
) -> Iterator[str]:
    if len(chunk.offsets) != len(tensor.shape) or len(chunk.lengths) != len(tensor.shape):
        yield f"has {len(chunk.offsets)} offsets and {len(chunk.lengths)} lengths in {len(tensor.shape)} dimensions"
        return
    for offset, length, extent in zip(chunk.offsets, chunk.lengths, tensor.shape, strict=True):
        if offset < 0 or length < 0 or offset + length > extent:
            yield f"[{offset}, {offset + length}) is not within [0, {extent})"
            return
    in_range = True
    for text in _range_problems(chunk, objects):
        in_range = False
        yield text
    if not in_range or tensor.transforms:
        return
    if chunk.end - chunk.begin != math.prod(chunk.lengths) * itemsize_bytes:
        yield f"{chunk.end - chunk.begin} bytes do not hold {chunk.lengths} of {tensor.dtype}"
    elif chunk.begin % itemsize_bytes:
        yield f"byte {chunk.begin} is not aligned to {tensor.dtype}"


def _range_problems(stored: Chunk | StoredValue, objects: Sequence[StoredObject]) -> Iterator[str]:
    if not 0 <= stored.object_index < len(objects):
        yield f"object {stored.object_index} does not exist"
    elif not 0 <= stored.begin <= stored.end <= objects[stored.object_index].size:
        yield f"bytes [{stored.begin}, {stored.end}) are not within object {stored.object_index}"


def fills_once(boxes: Iterable[_Box], shape: tuple[int, ...]) -> bool:
    """Return True if every element of an array of `shape` is in exactly one of `boxes`.

    Takes time proportional to the number of boxes and dimensions. The indicator functions of the boxes add up to that
    of the whole array if and only if their mixed differences do. These are compared as polynomials at a random point:
    each position on an axis stands for a random number. If the sums differ, the chance that their values do not is
    below 2 ** -110 for every document (Schwartz, Zippel, 1979), because the numbers cannot be known beforehand.
    """
    filled = [(offsets, lengths) for offsets, lengths in boxes if 0 not in lengths]
    if len(filled) == 1:  # nearly always, and large jobs have a million tensors
        return filled[0] == ((0,) * len(shape), shape)
    split = [dim for dim, extent in enumerate(shape) if any(lengths[dim] != extent for _, lengths in filled)]
    numbers: dict[tuple[int, int], int] = defaultdict(lambda: secrets.randbelow(_PRIME))

    def total(boxes: Sequence[_Box]) -> int:
        result = 0
        for offsets, lengths in boxes:
            term = 1
            for dim in split:
                begin, end = offsets[dim], offsets[dim] + lengths[dim]
                term = term * (numbers[dim, begin] - numbers[dim, end]) % _PRIME
            result += term
        return result % _PRIME

    return total(filled) == total([] if 0 in shape else [((0,) * len(shape), shape)])


def is_sound(tensor: StoredTensor, itemsize_bytes: int, object_sizes_bytes: Integers) -> bool:
    """Return True if the chunks certainly have no problem. `find_problems` names the problems.

    The tensor's shape must be a shape already, of less than 2^63 bytes, so that no sum or product here overflows
    unnoticed: extents bound offsets and lengths, and a product that wraps has a zero among its factors.
    """
    import numpy as np

    def column(value_of: Callable[[Chunk], int]) -> Integers:
        return np.fromiter(map(value_of, chunks), dtype=np.int64, count=len(chunks))

    chunks, shape = tensor.chunks, tensor.shape
    try:
        offsets = np.array([chunk.offsets for chunk in chunks], dtype=np.int64)
        lengths = np.array([chunk.lengths for chunk in chunks], dtype=np.int64)
        object_index, begins, ends = map(column, (_OBJECT_INDEX, _BEGIN, _END))
    except (ValueError, OverflowError):
        return False  # of different numbers of dimensions, or beyond any size
    if offsets.shape != (len(chunks), len(shape)) or lengths.shape != offsets.shape:
        return False
    extents = np.array(shape, dtype=np.int64)
    return (
        _hold_all((lengths >= 0) & (lengths <= extents) & (offsets >= 0))
        and _hold_all(offsets <= extents - lengths)
        and _hold_all((object_index >= 0) & (object_index < len(object_sizes_bytes)))
        and _hold_all((begins >= 0) & (begins <= ends) & (ends <= object_sizes_bytes[object_index]))
        and (bool(tensor.transforms) or _hold(lengths, begins, ends, itemsize_bytes))
        and arrays_fill_once(offsets, lengths, shape)
    )


def _hold(lengths: Integers, begins: Integers, ends: Integers, itemsize_bytes: int) -> bool:
    """Return True if each range is as long as its chunk's elements, and aligned to them."""
    num_bytes = lengths.prod(axis=1, dtype="int64") * itemsize_bytes
    return _hold_all((ends - begins == num_bytes) & (begins % itemsize_bytes == 0))


def _hold_all(flags: npt.NDArray[np.bool_]) -> bool:
    return bool(flags.all())


def arrays_fill_once(offsets: Integers, lengths: Integers, shape: Sequence[int]) -> bool:
    """Do what `fills_once` does for many boxes inside `shape`, one per row of ``[num_boxes, num_dims]``.

    The same corners are counted, by sorting. If they are too many or too far apart for that, `fills_once` decides.
    """
    import numpy as np

    extents = np.array(shape, dtype=np.int64)
    is_filled = (lengths != 0).all(axis=1)
    if not is_filled.all():
        offsets, lengths = offsets[is_filled], lengths[is_filled]
    split: list[int] = np.flatnonzero((lengths != extents).any(axis=0)).tolist()
    sides = [shape[dim] + 1 for dim in split]
    if len(lengths) == 0 or 0 in shape or len(split) > _MAX_SORTED_DIMS or math.prod(sides) > MAX_BYTES:
        return fills_once(_rows(offsets, lengths), tuple(shape))
    # A corner's position as one number, each with its sign; the last row is the whole array, to be taken away.
    begins = np.vstack([offsets[:, split], np.zeros((1, len(split)), dtype=np.int64)])
    ends = np.vstack([offsets[:, split] + lengths[:, split], extents[None, split]])
    codes = np.zeros((len(begins), 1), dtype=np.int64)
    signs = np.ones((len(begins), 1), dtype=np.int8)
    signs[-1] = -1
    for dim, side in enumerate(sides):
        codes = np.hstack([codes * side + begins[:, dim : dim + 1], codes * side + ends[:, dim : dim + 1]])
        signs = np.hstack([signs, -signs])
    order = np.argsort(codes, axis=None)
    codes, signs = codes.ravel()[order], signs.ravel()[order]
    first = np.flatnonzero(np.concatenate(([True], codes[1:] != codes[:-1])))
    return not np.add.reduceat(signs, first, dtype=np.int64).any()


def _rows(offsets: Integers, lengths: Integers) -> Iterable[_Box]:
    rows: Any = zip(offsets.tolist(), lengths.tolist(), strict=True)
    return ((tuple(begin), tuple(length)) for begin, length in rows)
