"""Lines that a type checker has to refuse. The comment of each line names the fault."""

from __future__ import annotations

import cloudckpt

cloudckpt.save({"step": 1}, 7)  # wrong: where to
cloudckpt.Options(timeout_s="a minute")  # wrong: a number
cloudckpt.Options(async_in_flight="fork")  # wrong: no such mode
print(cloudckpt.async_save({"step": 1}, "memory://a").uploaded)  # wrong: no such attribute
print(cloudckpt.latest("memory://a").uri)  # wrong: there may be none
