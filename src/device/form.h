// SPDX-License-Identifier: Apache-2.0
// A storage as programs for devices are made for it (kernel/cuda/form.cuh).
#pragma once
#include <array>
#include <initializer_list>
#include <span>

#include "kernel/cuda/form.cuh"
#include "stowage/descriptor.h"

namespace stowage::device {

/// Whether programs serve it: every storage but nf4:torchao:f64, whose parts are doubles.
bool has_form(const Storage& storage) noexcept;

/// Of a storage that has one, and the dtype of values that are read or written: f64, f32, bf16 or
/// f16.
cuda::Form form_of(const Storage& storage, Dtype values);

/// Its 16 halves by bytes: four lower ones in each of four words, then the upper ones.
std::array<std::uint32_t, 8> planes_of(const cuda::Form& form) noexcept;

/// A weight whose parts lie in memory of the device, codes first. Throws as layout().
cuda::Weight weight_of(const Storage& storage, const Shape& shape, std::span<void* const> parts);

/// Whether kernels may take pieces of such a weight without looking how they lie: each of
/// `together` elements in one row, its spans in one group, all at whole 16 bytes. `arrays`: what is
/// read or written beside the weight.
bool is_whole(const cuda::Form& form, const cuda::Weight& weight,
              std::initializer_list<const void*> arrays);

/// Whether products may take slabs of a row, 64 elements with one scale whose codes stand for one
/// of 16 values, where pieces are whole and rows are whole slabs.
bool has_slabs(const cuda::Form& form) noexcept;

}  // namespace stowage::device
