// SPDX-License-Identifier: Apache-2.0
// When weights were read, waited for and used: a timeline for Perfetto and chrome://tracing.
#pragma once
#include <cstddef>
#include <string>

#include "stowage/error.h"

namespace stowage {
inline namespace v0 {

/// Records what all engines of the process do from now on: `read` (a piece of a weight comes, on
/// the thread that fetches it), `wait` (acquire() for bytes or room) and `use` (a lease lives). At
/// most `most_events` are kept, about 100 bytes each. Throws invalid_argument if a trace is
/// running.
STOWAGE_API void start_trace(std::size_t most_events = std::size_t{1} << 20);

/// Ends the trace: a JSON object in the Trace Event Format. `traceEvents` are complete events
/// ("ph": "X") by their begin, in microseconds of the steady clock; `args` has the bytes. `dropped`
/// counts those that found no room. Throws invalid_argument if none is running.
STOWAGE_API std::string stop_trace();

}  // namespace v0
}  // namespace stowage
