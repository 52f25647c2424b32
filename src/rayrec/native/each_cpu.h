/* Includes BODY for all CPUs, and on x86 also for AVX2 and AVX-512. Functions and types NAMED(name) become name, name_avx2 and
 * name_avx512. Vectors have LANES values, the size of a register (compilers generate slow code for larger ones). Kernels marked KERNEL
 * must inline all their callees. The caller selects the kernel of its CPU: the dispatch of some compilers needs a runtime library. */
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define FUSED , optimize("fp-contract=fast") /* other compilers do so, or multiply and add in two steps */
#else
#define FUSED
#endif
#define VECTOR(type) type __attribute__((vector_size(LANES * sizeof(type)), aligned(sizeof(type)), may_alias))

#define NAMED(name) name
#define KERNEL
#define LANES 4
typedef VECTOR(float) lanes;
typedef VECTOR(int32_t) whole_lanes;
typedef VECTOR(uint32_t) bit_lanes;
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
typedef VECTOR(uint32_t) bit_lanes_avx2;
#include BODY
#undef NAMED
#undef KERNEL
#undef LANES

#define NAMED(name) name##_avx512
#define KERNEL __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl") FUSED))
#define LANES 16
typedef VECTOR(float) lanes_avx512;
typedef VECTOR(int32_t) whole_lanes_avx512;
typedef VECTOR(uint32_t) bit_lanes_avx512;
#include BODY
#endif
