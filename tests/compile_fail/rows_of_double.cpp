// K, V and Q come in fp32, fp16 or bf16; double is refused where the view is made, not deep inside.
// expect: no matching function for call to
// expect: constraints not satisfied
// expect: scalar
#include "sekv/core/view.hpp"

#ifdef SEKV_EXPECT_OK
using element = float;
#else
using element = double;
#endif

sekv::rows_view view_of(const element* data) { return sekv::rows<element>(data, 1, 1, 64); }
