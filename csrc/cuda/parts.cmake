# What is compiled of the kernels, in files of their own, so that several processors have something to do.
set(few_nf4 "S(kNf4, 2) D(kNf4) D(kNf4Fine)")
set(few_packed "S(kInt8, 1) S(kTernary, 1) S(kBinary, 1) D(kInt8) D(kTernary) D(kBinary)")
set(few_four "S(kCode4, 1) S(kCode4Fine, 1) D(kCode4Fine)")
set(few_shift "S(kShift4, 1) S(kShift4Fine, 1) S(kShift8, 1) D(kShift4Fine)")
set(few_blocks "S(kInt8Block, 1) S(kE4m3Block, 1)")
set(few_float8 "S(kE4m3, 1) S(kE5m2, 1) D(kE4m3) D(kE5m2)")
set(wide_nf4 "W(kNf4, 1)")
set(wide_packed "W(kInt8, 1) W(kTernary, 1) W(kBinary, 1)")
set(wide_four "W(kCode4Fine, 1)") # bfloat16 alone
set(wide_shift "W(kBias4, 1)")
set(wide_float8 "W(kE4m3, 1) W(kE5m2, 1)")
set(odd_packed "O(kNf4) O(kInt8) O(kTernary) O(kBinary)")
set(odd_float8 "O(kE4m3) O(kE5m2)")
set(type_bf16 __nv_bfloat16)
set(type_f16 __half)

set(eformer_cuda_parts "")
function(eformer_part name header instances)
  set(file "${CMAKE_CURRENT_BINARY_DIR}/parts/${name}.cu")
  string(REPLACE " " "\n" lines "${instances}")
  string(REPLACE ",\n" ", " lines "${lines}")
  file(CONFIGURE OUTPUT "${file}" CONTENT [[// Made by parts.cmake.
#include "@header@"

namespace eformer {
#define S(FMT, TERMS) template cudaError_t multiply_skinny<FMT, @type@, TERMS>(cudaStream_t, const Product&, const Device&);
#define P(FMT) template cudaError_t multiply_split<FMT, @type@>(cudaStream_t, const Product&, const Device&);
#define D(FMT) template cudaError_t multiply_dot<FMT, @type@>(cudaStream_t, const Product&, const Device&);
#define B(KIND) template cudaError_t multiply_bytes<KIND, @form@>(cudaStream_t, const BytesProduct&, const Device&);
#define T(KIND) template cudaError_t multiply_tiles<KIND, @form@>(cudaStream_t, const BytesProduct&, const Device&);
#define O(FMT) template cudaError_t multiply_odd<FMT, @type@, @form@>(cudaStream_t, const WideProduct&, const Device&);
#define A(NT) template cudaError_t multiply_axpy<NT>(cudaStream_t, const Product&, const Device&);
#define W(FMT, TERMS) template cudaError_t multiply_wide<FMT, @type@, @form@, TERMS>(cudaStream_t, const WideProduct&);
@lines@
}  // namespace eformer
]] @ONLY)
  set(eformer_cuda_parts ${eformer_cuda_parts} "${file}" PARENT_SCOPE)
endfunction()

foreach(kind bf16 f16)
  set(type ${type_${kind}})
  eformer_part(few_${kind}_blocks skinny_launch.cuh "${few_blocks}")
  eformer_part(few_${kind}_shift few_launch.cuh "${few_shift}")
  foreach(formats nf4 packed four float8)
    set(instances "${few_${formats}}")
    if(kind STREQUAL bf16 AND formats STREQUAL nf4)
      string(APPEND instances " S(kNf4, 1)")
    endif()
    eformer_part(few_${kind}_${formats} few_launch.cuh "${instances}")
    foreach(form kDot kAxpy)
      if(kind STREQUAL bf16 OR NOT formats STREQUAL four)
        eformer_part(wide_${kind}_${form}_${formats} wide_launch.cuh "${wide_${formats}}")
      endif()
    endforeach()
  endforeach()
  foreach(form kDot kAxpy)
    eformer_part(wide_${kind}_${form}_shift wide_launch.cuh "${wide_shift}")
    eformer_part(odd_${kind}_${form}_packed odd_launch.cuh "${odd_packed}")
    eformer_part(odd_${kind}_${form}_float8 odd_launch.cuh "${odd_float8}")
  endforeach()
endforeach()
set(type ${type_bf16})
eformer_part(axpy axpy_launch.cuh "A(1) A(2)")
eformer_part(split split_launch.cuh "P(kNf4) P(kCode4)")
foreach(form kDot kAxpy)
  eformer_part(wide_bf16_${form}_sums wide_launch.cuh "W(kNf4, 2)")
  eformer_part(wide_bf16_${form}_shift_sums wide_launch.cuh "W(kBias4, 2)")
  eformer_part(wide_bf16_${form}_zeros wide_launch.cuh "W(kShift4Fine, 1)")
  eformer_part(wide_bf16_${form}_blocks wide_launch.cuh "W(kInt8Block, 1) W(kE4m3Block, 1)")
  foreach(kind kInt8 kE4m3)
    eformer_part(bytes_${form}_${kind} bytes_launch.cuh "B(${kind})")
    eformer_part(tiles_${form}_${kind} tiles_launch.cuh "T(${kind})")
  endforeach()
endforeach()
