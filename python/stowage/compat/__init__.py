# SPDX-License-Identifier: Apache-2.0
"""Public names of other libraries over Stowage: users move by changing one import (docs/compat.md).

Each package here mirrors the module tree of the library it is named after and translates names
and arguments. It holds no arithmetic and no state.
"""
