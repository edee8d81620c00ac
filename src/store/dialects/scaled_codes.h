// SPDX-License-Identifier: Apache-2.0
// A weight of codes of 8 bits, or of packed ones in the order of their storage, with a tensor of
// scales and maybe one of zero points, as several dialects have it under names of their own.
#pragma once
#include <string>
#include <string_view>

#include "store/dialects/dialects.h"

namespace stowage::dialects {

struct ScaledCodes {
  std::string name;                  // of the weight
  std::string codes{}, scale{};      // the tensors
  std::string third{};               // zero points, or the number over scales of e4m3
  Storage storage{};                 // of scales of f32, which those in the file change; else so
  bool bytes_are_exponents = false;  // U8 scales are powers of two; else they are refused
  PartForm codes_form{}, third_form{};
  PartForm scale_form{};            // scales that are not of f32 are not rounded
  std::optional<Dtype> compute{};   // nothing: what the configuration says
  std::optional<Dtype> codes_in{};  // the type of packed codes, where it is not the storage's
  std::optional<Shape> logical{};   // where that of the codes does not tell it
  Shape number{};                   // of one scale, beside [] and [1]; so it is written

  /// Refuses at `near` what is missing; whatever is not as the storage asks at its own place.
  WeightInfo& add(Claims& claims, const Place& near) const;
  /// The tensors that add() reads as a weight of this storage and shape.
  void write(Wording& wording, const WeightInfo& weight) const;
};

/// A size of a tensor, so many times; refuses at the tensor what no shape has.
std::int64_t size_of(const Claims& claims, const TensorInfo& tensor, int dim, std::int64_t times);
/// "a.b.weight" -> "a.b".
std::string_view module_of(std::string_view weight);
/// A number for the activations of the weight's module, if it is there: it belongs to the weight.
void add_activation_scale(Claims& claims, WeightInfo& weight, std::string_view name);
/// Zero points of a symmetric weight, if they are there: all of them must be 0.
void add_zeros(Claims& claims, WeightInfo& weight, const std::string& name);
/// Refuses a weight that rests where the configuration says that its module does not.
void check_not_listed(const Claims& claims, const WeightInfo& weight, const char* key);
/// Refuses float8 matrices that nothing has taken: what would be their scale is missing.
void refuse_unscaled(const Claims& claims, std::string_view suffix);

}  // namespace stowage::dialects
