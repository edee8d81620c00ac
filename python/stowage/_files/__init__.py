# SPDX-License-Identifier: Apache-2.0
"""Between models and files: names and forms on disk, reading, filling, writing."""
