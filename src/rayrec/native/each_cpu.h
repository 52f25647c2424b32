/* Includes BODY once for any CPU, and on x86 for those with AVX2 and AVX-512, too: with functions and types called NAMED(name), which
 * become name, name_avx2 and name_avx512; vectors of LANES values, as many as a register holds (compilers make slow code of larger
 * ones); kernels marked KERNEL, which must contain all that they call. The caller takes the one for its CPU: not every compiler's own
 * dispatch works without its runtime library. */
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define FUSED , optimize("fp-contract=fast") /* others do so, or multiply and add in two steps */
#else
#define FUSED
#endif
#define VECTOR(type) type __attribute__((vector_size(LANES * sizeof(type)), aligned(sizeof(type)), may_alias))

#define NAMED(name) name
#define KERNEL
#define LANES 4
typedef VECTOR(float) lanes;
typedef VECTOR(int32_t) whole_lanes;
#include BODY
#undef NAMED
#undef KERNEL
#undef LANES

#if defined(__x86_64__)
#define NAMED(name) name##_avx2
#define KERNEL __attribute__((target("avx2,fma") FUSED))
#define LANES 8
typedef VECTOR(float) lanes_avx2;
typedef VECTOR(int32_t) whole_lanes_avx2;
#include BODY
#undef NAMED
#undef KERNEL
#undef LANES

#define NAMED(name) name##_avx512
#define KERNEL __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl") FUSED))
#define LANES 16
typedef VECTOR(float) lanes_avx512;
typedef VECTOR(int32_t) whole_lanes_avx512;
#include BODY
#endif
