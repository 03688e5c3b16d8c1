"""A GGUF file's tensors in float32, or in bfloat16, with all that it says of the model: what quantised weights mean.

    python tests/scripts/widen_gguf.py FROM.gguf TO.gguf [--bfloat16]

Needs `pip install gguf`.
"""

from __future__ import annotations

import argparse

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

LEFT_OUT = ("general.architecture", "general.file_type", "general.quantization_version")  # written anew, or void
HALF = GGMLQuantizationType.BF16


def widen(source: str, target: str, *, half: bool) -> None:
    """Write the file anew; vectors stay float32 in either case."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    writer.add_file_type(LlamaFileType.MOSTLY_BF16 if half else LlamaFileType.ALL_F32)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in LEFT_OUT:
            continue
        if field.types[0] == GGUFValueType.ARRAY:
            writer.add_array(name, field.contents())
        else:
            writer.add_key_value(name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        shape = [int(size) for size in tensor.shape[::-1]]
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        if half and len(shape) > 1:
            writer.add_tensor(tensor.name, quantize(values, HALF), raw_dtype=HALF)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--bfloat16", action="store_true")
    given = parser.parse_args()
    widen(given.source, given.target, half=given.bfloat16)
