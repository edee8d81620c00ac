// SPDX-License-Identifier: Apache-2.0
// Our own: the manifest in the metadata of a file, and labels beside tensors that have none. What
// both say is checked against the tensors, never believed against them.
#include "base/formatted.h"
#include "store/dialects/dialects.h"
#include "store/dialects/groups.h"
#include "store/label.h"
#include "store/quant_state.h"

namespace stowage::dialects {
namespace ours {
namespace {

void read_weight(Claims& claims, const std::string& name, const ManifestWeight& said) {
  const TensorInfo* const codes = claims.find(name);
  if (codes == nullptr) {
    refuse(Refusal::manifest_part, {claims.source().paths[0], name, std::nullopt},
           "no such tensor");
  }
  if (WeightInfo* const info = claims.known(name)) {
    if (info->storage != said.storage || info->shape != said.shape) {
      refuse(Refusal::manifest_part, claims.place(*codes),
             formatted("{} {} for {} {}", to_string(info->storage), to_string(info->shape),
                       to_string(said.storage), to_string(said.shape)));
    }
    info->compute = said.compute;
    return;
  }
  std::vector<std::string> parts;
  for (const Declaration& expected : disk_layout(name, said.storage, said.shape)) {
    parts.push_back(claims.part(Refusal::manifest_part, *codes, expected).name);
  }
  if (said.storage.scaling.actorder)
    check_groups(claims, Refusal::manifest_part, *claims.find(parts.back()),
                 layout(said.storage, said.shape).parts[1].shape[1]);
  if (has_quant_state(said.storage)) {
    refuse(Refusal::manifest_part, claims.place(*codes), "a 4-bit weight without a quant_state");
  }
  claims.add(name, said.storage, said.shape, std::move(parts), said.compute);
}

}  // namespace
}  // namespace ours

void read_manifest(Claims& claims) {
  for (const auto& [name, weight] : claims.source().said) ours::read_weight(claims, name, weight);
}

void read_labels(Claims& claims) {
  for (const TensorInfo& tensor : claims.tensors()) {
    if (!tensor.name.ends_with(kLabel) || tensor.dtype != Dtype::u8) continue;
    const std::string name = tensor.name.substr(0, tensor.name.size() - kLabel.size());
    if (claims.find(name) == nullptr) continue;  // a model may use the name itself
    if (tensor.bytes > kLongestText)
      refuse(Refusal::manifest_value, claims.place(tensor),
             described(tensor) + " for a short U8 text");
    ours::read_weight(claims, name, parse_label(claims.place(tensor), claims.read(tensor)));
    claims.add_beside(*claims.known(name), tensor.name);
  }
}

}  // namespace stowage::dialects
