"""Exactness is demanded in float32 with the wheel's own BLAS, whose results do not depend on the width of a forward."""

import os

os.environ["PACELINE_OPENBLAS"] = "0"
