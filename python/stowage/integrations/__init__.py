# SPDX-License-Identifier: Apache-2.0
"""What other libraries need to know of resting weights; each module imports its library."""
