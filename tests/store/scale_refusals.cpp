// SPDX-License-Identifier: Apache-2.0
// Scales that do not fit their weight.
#include "store/refusal_rows.h"

namespace stowage::test {
namespace {

// An 8-bit weight of this shape with an F32 scale of that one.
Make scaled(const std::string& shape, std::size_t elements, const std::string& scale,
            std::size_t scales) {
  return header("{" + tensor("w_scale", "F32", scale, 0, 4 * scales) + "," +
                    tensor("w", "F8_E4M3", shape, 4 * scales, 4 * scales + elements) + "}",
                4 * scales + elements);
}

const Rows kScales{{
    {Refusal::scale_shape,
     "too many rows",
     scaled("[2,4]", 8, "[3,1]", 3),
     {"tensor 'w_scale'", "[3, 1] for [2, 4]"}},
    {Refusal::scale_shape, "rank 3", scaled("[2,4]", 8, "[2,1,1]", 2), {"tensor 'w_scale'"}},
    {Refusal::scale_shape,
     "more blocks than columns",
     scaled("[2,4]", 8, "[2,5]", 10),
     {"tensor 'w_scale'"}},
    {Refusal::scale_shape, "no blocks", scaled("[2,4]", 8, "[2,0]", 0), {"tensor 'w_scale'"}},
    {Refusal::scale_shape,
     "flat but not a row each",
     scaled("[2,4]", 8, "[4]", 4),
     {"tensor 'w_scale'"}},
    {Refusal::scale_block,
     "an even split or a power of two",
     scaled("[1,96]", 96, "[1,2]", 2),
     {"[1, 2] for [1, 96]", "which may be f8_e4m3:block48 or f8_e4m3:block64"}},
    {Refusal::scale_block,
     "neither",
     scaled("[1,29]", 29, "[1,5]", 5),
     {"no usual", "f8_e4m3:block6 to f8_e4m3:block7"}},
}};

}  // namespace
}  // namespace stowage::test
