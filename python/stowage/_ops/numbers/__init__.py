# SPDX-License-Identifier: Apache-2.0
"""What codes mean, in stock torch: the codec of the composite, of writes and of saving."""
