// The registries as this reader knows them. A test compares them with spec/registry/*.md.

const SAME = 's';
const PAIR = 's+[2]';
const DOUBLED = 's·2';

// name, itemsize, safetensors type, shape there, rotate
const DTYPE_ROWS = [
  ['bfloat16', 2, 'BF16', SAME, true],
  ['bool', 1, 'BOOL', SAME, false],
  ['complex128', 16, 'F64', PAIR, true],
  ['complex32', 4, 'F16', PAIR, true],
  ['complex64', 8, 'C64', SAME, true],
  ['float16', 2, 'F16', SAME, true],
  ['float32', 4, 'F32', SAME, true],
  ['float4_e2m1fn', 1, 'U8', SAME, false],
  ['float4_e2m1fn_x2', 1, 'F4', DOUBLED, false],
  ['float64', 8, 'F64', SAME, true],
  ['float6_e2m3fn', 1, 'U8', SAME, false],
  ['float6_e3m2fn', 1, 'U8', SAME, false],
  ['float8_e3m4', 1, 'U8', SAME, false],
  ['float8_e4m3', 1, 'U8', SAME, false],
  ['float8_e4m3b11fnuz', 1, 'U8', SAME, false],
  ['float8_e4m3fn', 1, 'F8_E4M3', SAME, false],
  ['float8_e4m3fnuz', 1, 'F8_E4M3FNUZ', SAME, false],
  ['float8_e5m2', 1, 'F8_E5M2', SAME, false],
  ['float8_e5m2fnuz', 1, 'F8_E5M2FNUZ', SAME, false],
  ['float8_e8m0fnu', 1, 'F8_E8M0', SAME, false],
  ['int16', 2, 'I16', SAME, false],
  ['int32', 4, 'I32', SAME, false],
  ['int64', 8, 'I64', SAME, false],
  ['int8', 1, 'I8', SAME, false],
  ['uint16', 2, 'U16', SAME, false],
  ['uint32', 4, 'U32', SAME, false],
  ['uint64', 8, 'U64', SAME, false],
  ['uint8', 1, 'U8', SAME, false],
  ...[1, 2, 3, 4, 5, 6, 7].flatMap((bits) => [
    [`int${bits}`, 1, 'U8', SAME, false],
    [`uint${bits}`, 1, 'U8', SAME, false],
  ]),
];

// The real type's itemsize, which codec 2 works with (section 12).
const REAL_ITEMSIZE = new Map([['complex128', 8], ['complex64', 4], ['complex32', 2]]);

/** name -> {name, itemsize, storedAs, shapeRule, rotate, planeCount} */
export const DTYPES = new Map(DTYPE_ROWS.map(([name, itemsize, storedAs, shapeRule, rotate]) => [
  name,
  { name, itemsize, storedAs, shapeRule, rotate, planeCount: REAL_ITEMSIZE.get(name) ?? itemsize },
]));

/** The shape of a raw chunk in its safetensors header. Takes and gives BigInts. */
export function storedShape(dtype, shape) {
  if (dtype.shapeRule === PAIR) return [...shape, 2n];
  if (dtype.shapeRule !== DOUBLED) return shape;
  if (shape.length === 0) return [2n];
  return [...shape.slice(0, -1), shape[shape.length - 1] * 2n];
}

export const RAW = 0;
export const ZSTD = 1;
export const PLANES = 2;
export const CODEC_NAMES = ['raw', 'zstd', 'planes+zstd'];

export const FEATURES = new Set(['planes', 'zstd']);
