# SPDX-License-Identifier: Apache-2.0
"""What all rows of a tensor of a file have in common, and several of a model's have one each of."""

from stowage._ops.errors import InvalidArgument


class NotInCommon(InvalidArgument):
    """Rows have other scales, or numbers over scales, than one another."""

    def __init__(self, name: str, what: str, how: str) -> None:
        super().__init__(
            f"stowage.save: {name}: must have one {what} for all rows, as in its file; a write to "
            f"{how}; save with requantize=True, which rounds the others again, or without dialect"
        )
