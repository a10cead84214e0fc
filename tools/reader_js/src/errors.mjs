// The one error of this reader, and the plain form of it that reports hold.

/**
 * A fault with a code of registry/errors.md. `problems` has all faults of its stage, in the plain
 * form: {code, message}, and of the place any of where, label, section, page, path, tensor, chunk, block.
 */
export class DsdError extends Error {
  constructor(code, message, place = {}) {
    super(`${code}: ${message}`);
    this.name = 'DsdError';
    this.code = code;
    this.problems = [problem(code, message, place)];
  }

  /** One error for all problems of a stage; its code is that of the first. */
  static fromProblems(problems) {
    const [{ code, message }] = problems;
    const more = problems.length > 1 ? ` (and ${problems.length - 1} more)` : '';
    const error = new DsdError(code, message + more);
    error.problems = problems;
    return error;
  }
}

export function problem(code, message, place = {}) {
  return { code, message, ...place };
}

/** Add what was thrown to a list of problems, unless it is no fault of a checkpoint. */
export function addProblems(problems, error) {
  if (!(error instanceof DsdError)) throw error;
  problems.push(...error.problems);
}

/** Call `run`, and say of what it throws where it happened. */
export function withPlace(place, run) {
  try {
    return run();
  } catch (error) {
    if (!(error instanceof DsdError)) throw error;
    throw new DsdError(error.code, error.problems[0].message, place);
  }
}

const PLACE_FIELDS = ['label', 'section', 'page', 'path', 'tensor', 'chunk', 'block'];

export function describePlace(place) {
  const fields = PLACE_FIELDS.filter((name) => place[name] !== undefined).map((name) => `${name} ${place[name]}`);
  return [place.where, ...fields].filter((text) => text !== undefined).join(', ');
}
