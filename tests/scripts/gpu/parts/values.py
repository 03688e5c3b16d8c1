"""Every product against float64 at 1, 3 and 8 rows.

`row_as_alone`: whether rows among others have the bits that they have alone; `same_again`: whether two calls agree.
"""

from __future__ import annotations

import torch
from measuring import Part
from subjects import as_on_cuda

from selfspec.models.kernels import BY_DEVICE
from selfspec.models.low_precision import quantize

part = Part("values")
as_on_cuda(part)
device = part.device
SHAPES = ((16, 64), (33, 80), (1000, 1536)) + (() if part.toy else ((4096, 4096), (28672, 4096), (4096, 14336)))

for out, into in SHAPES:
    torch.manual_seed(out)
    weight = torch.randn(out, into, device=device).to(part.dtype)
    x = torch.randn(8, into, device=device).to(part.dtype)
    products = {"bfloat16": (lambda: lambda x, w=weight: x @ w.t(), weight.double())}
    for bits in (8, 4):
        if bits == 4 and into % 32:
            continue
        held = quantize(weight, bits)
        exact = held.weight(torch.float64)
        for name, kernel in BY_DEVICE[device.type][bits].items():
            products[f"int{bits}, {name}"] = (lambda k=kernel, h=held: k(h, part.dtype), exact)
    for name, (make, exact) in products.items():
        about = {"product": name, "outputs": out, "inputs": into}
        with part.attempt("product", **about), torch.inference_mode():
            product = make()
            alone, errors, others, again = torch.cat([product(row[None]) for row in x]), {}, True, True
            for rows in (1, 3, 8):
                ours, right = product(x[:rows]), x[:rows].double() @ exact.t()
                errors[f"error, {rows} rows"] = float((ours.double() - right).norm() / right.norm())
                others &= torch.equal(ours, alone[:rows])
                again &= torch.equal(ours, product(x[:rows]))
            part.line("product", **about, **errors, row_as_alone=others, same_again=again)
