"""``python -m cloudckpt._process FILE``: the upload process of a training process, at the other end of FILE."""

import sys

from cloudckpt._process.child import run

run(int(sys.argv[1]))
