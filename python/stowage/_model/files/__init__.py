# SPDX-License-Identifier: Apache-2.0
"""Models from files and to files: filling, building, saving, whole and in pieces."""
