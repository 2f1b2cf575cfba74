"""Changes bytes, some of them with an eye for what they are: pickles, archives, JSON, databases.

Each function takes a ``Random`` and bytes, and returns other bytes; it raises an ``Exception`` for
bytes that are not of its kind.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import sqlite3
import struct
import zipfile
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

__all__ = ["Mutator", "archived", "database", "framed_json", "jsons", "mutate", "pickled", "raw"]

Mutator = Callable[[Random, bytes], bytes]

_NUMBERS = [0, 1, 2, 3, 7, 127, 128, 255, 256, 65535, 65536, 1 << 20, (1 << 31) - 1, 1 << 31]
_NUMBERS += [(1 << 32) - 1, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
_TEXTS = ["", "\0", "a/../../b", "..", "/etc/passwd", "x" * 300, "é\ud800", "nan", "-1", "1e999"]
_VALUES: list[Any] = [None, True, False, -1, 0.5, float("nan"), float("inf"), 10**400, [], {}, ""]
_VALUES += [[[]], {"": None}, *_NUMBERS, *_TEXTS]
_SIZE_MAX = 1 << 20
_DEEP = 3000


def mutate(
    random: Random, data: bytes, mutators: Sequence[Mutator], others: Sequence[bytes]
) -> bytes:
    """One to four changes; by any of the mutators that fit, or of the bytes as such."""
    for _ in range(random.choice((1, 1, 1, 2, 2, 4))):
        if mutators and random.random() < 0.75:
            try:
                data = random.choice(mutators)(random, data)
                continue
            except Exception:
                pass  # the bytes are no longer of that kind
        data = raw(random, data, others)
    return data[:_SIZE_MAX]


def raw(random: Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Bits, bytes, numbers and runs of bytes, wherever they are."""
    made = bytearray(data)
    at = random.randrange(len(made) + 1)
    run = min(len(made) - at, int(random.expovariate(1 / 16)) + 1)
    kind = random.randrange(8)
    if kind == 0 and at < len(made):
        made[at] ^= 1 << random.randrange(8)
    elif kind == 1 and at < len(made):
        made[at] = random.randrange(256)
    elif kind == 2:
        form = random.choice(["<B", "<H", "<I", "<Q", ">I", ">Q"])
        size = struct.calcsize(form)
        number = random.choice(_NUMBERS) + random.choice((0, 0, -1, 1))
        made[at : at + size] = struct.pack(form, number % (1 << (8 * size)))
    elif kind == 3:
        del made[at : at + run]
    elif kind == 4:
        made[at:at] = made[at : at + run] * random.choice((1, 1, 2, 50))
    elif kind == 5:
        del made[at:]
    elif kind == 6:
        made[at:at] = random.randbytes(run)
    else:
        other = random.choice(others) if others else bytes(made)
        begin = random.randrange(len(other) + 1)
        made[at : at + run] = other[begin : begin + random.choice((run, 4 * run))]
    return bytes(made)


def _picked(random: Random) -> bytes:
    """A few opcodes that do something with what is on the stack."""
    made = [
        b"N", b")", b"]", b"}", b"(", b"0", b"2", b"\x85", b"\x86", b"\x87", b"t", b"l", b"d",
        b"R", b"\x81", b"b", b"s", b"u", b"a", b"e", b"\x88", b"\x8f", b"(\x91", b"\x94", b"Q",
        b"G" + random.randbytes(8), b"K" + random.randbytes(1), b"J" + random.randbytes(4),
        b"h" + random.randbytes(1), b"q" + random.randbytes(1), b"\x8c\x01a",
        b"X" + struct.pack("<I", 3) + b"abc", b"\x8a\x09" + random.randbytes(9),
        b"cbuiltins\nprint\n", b"cos\nsystem\n", b"ctorch\nSize\n", b"ctorch\nfloat32\n",
        b"ccollections\nOrderedDict\n", b"cbuiltins\ngetattr\n",
    ]  # fmt: skip
    return random.choice(made)


def pickled(random: Random, data: bytes) -> bytes:
    """The opcodes of a pickle, and their arguments."""
    places = [at for _, _, at in pickletools.genops(data) if at is not None]
    ends = [*places[1:], places[-1] + 1]
    one = random.randrange(len(places))
    begin, end = places[one], ends[one]
    other = random.randrange(len(places))
    kind = random.randrange(6)
    if kind == 0:
        return data[:begin] + data[end:]
    if kind == 1:
        return data[:begin] + data[places[other] : ends[other]] + data[end:]
    if kind == 2:
        more = data[places[other] : ends[min(other + random.randrange(30), len(ends) - 1)]]
        return data[:begin] + more + data[begin:]
    if kind == 3:
        return data[:begin] + _picked(random) * random.choice((1, 1, 1, 2, _DEEP)) + data[begin:]
    if kind == 4:
        return data[:begin] + _picked(random) + data[end:]
    number = random.choice(_NUMBERS) + random.choice((0, -1, 1))
    return data[:begin] + pickle.dumps(number, 2)[2:-1] + data[end:]


def archived(inner: Sequence[Mutator] = ()) -> Mutator:
    """The records of an archive: another content under the right checksum, names, order."""

    def change(random: Random, data: bytes) -> bytes:
        records: list[list[Any]] = []
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = [[info.filename, archive.read(info)] for info in archive.infolist()]
        one = random.randrange(len(records))
        kind = random.randrange(8)
        if kind == 0:
            del records[one]
        elif kind == 1:
            records.append([records[one][0], random.choice(records)[1]])
        elif kind == 2:
            records[one][0] = random.choice([*_TEXTS, records[0][0], "archive/data/0", "archive/x"])
        else:
            described = [record for record in records if str(record[0]).endswith("data.pkl")]
            record = random.choice(described) if described and kind > 3 else records[one]
            record[1] = mutate(random, bytes(record[1]), [pickled, *inner], ())
        made = io.BytesIO()
        how = zipfile.ZIP_DEFLATED if random.random() < 0.05 else zipfile.ZIP_STORED
        with zipfile.ZipFile(made, "w", how) as archive:
            for name, content in records:
                archive.writestr(zipfile.ZipInfo(str(name)), content, how)
        return made.getvalue()

    return change


def jsons(random: Random, data: bytes) -> bytes:
    """The values and names in JSON."""
    value = json.loads(data)
    places: list[tuple[Any, Any]] = []
    left = [value]
    while left:
        one = left.pop()
        keys = (
            list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        )
        places += [(one, key) for key in keys]
        left += [one[key] for key in keys]
    if not places or random.random() < 0.02:
        deep = (
            b"[" * _DEEP + b"]" * _DEEP
            if random.random() < 0.5
            else b'{"a":' * _DEEP + b"1" + b"}" * _DEEP
        )
        return deep if random.random() < 0.3 else json.dumps(random.choice(_VALUES)).encode()
    where, key = random.choice(places)
    kind = random.randrange(4)
    if kind == 0:
        del where[key]
    elif kind == 1 and isinstance(where, dict):
        where[random.choice([*_TEXTS, str(key) + "x"])] = where[key]
    elif kind == 2:
        other, its = random.choice(places)
        where[key] = (
            json.loads(json.dumps(other[its])) if its in other or isinstance(other, list) else None
        )
    else:
        where[key] = random.choice(_VALUES)
    return json.dumps(value).encode()


def framed_json(random: Random, data: bytes) -> bytes:
    """The header of a safetensors file: its length goes before it, and tensors follow."""
    (length,) = struct.unpack_from("<Q", data)
    header = jsons(random, data[8 : 8 + length])
    said = len(header) if random.random() < 0.9 else random.choice(_NUMBERS) % (1 << 64)
    return struct.pack("<Q", said) + header + data[8 + length :]


def database(random: Random, data: bytes) -> bytes:
    """Cells, rows and columns of an SQLite database."""
    base = sqlite3.connect(":memory:")
    try:
        base.deserialize(data)  # type: ignore[attr-defined]  # since Python 3.11
        tables = [
            name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type='table'")
        ]
        table = random.choice(tables)
        columns = [row[1] for row in base.execute(f'PRAGMA table_info("{table}")')]
        column = random.choice(columns)
        kind = random.randrange(8)
        values: list[Any] = [None, b"\xff\x00", 0.5, float("inf"), -1, *_TEXTS[:-3]]
        values += [number for number in _NUMBERS if number < 1 << 63]
        value = random.choice(values)
        if isinstance(value, str):
            value = value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        if kind == 0:
            base.execute(f'DROP TABLE "{table}"')
        elif kind == 1:
            base.execute(f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "{column}x"')
        elif kind == 2:
            base.execute(f'INSERT INTO "{table}" SELECT * FROM "{table}"')
        elif kind == 3:
            base.execute(f'DELETE FROM "{table}" WHERE rowid % 2 = ?', (random.randrange(2),))
        elif kind == 4:
            base.execute(f'UPDATE "{table}" SET "{column}" = ?', (value,))
        else:
            base.execute(
                f'UPDATE "{table}" SET "{column}" = ? WHERE rowid = '
                f'(SELECT rowid FROM "{table}" LIMIT 1 OFFSET ?)',
                (value, random.randrange(5)),
            )
        base.commit()
        return bytes(base.serialize())  # type: ignore[attr-defined]
    finally:
        base.close()
