// The one error of this reader, and the plain form of it that reports hold.

/** An error with a code of registry/errors.md, a message, and the place it is about. */
export class DsdError extends Error {
  /**
   * @param {string} code lower_snake, from registry/errors.md
   * @param {string} message what failed, expected and got
   * @param {object} place any of label, path, tensor, chunk, block, where
   */
  constructor(code, message, place = {}) {
    super(`${code}: ${message}`);
    this.name = 'DsdError';
    this.code = code;
    this.place = place;
    this.where = describePlace(place);
    this.problems = [problem(code, message, place)];
  }

  /** One error for all problems of a stage; its code is that of the first. */
  static fromProblems(problems) {
    const [first] = problems;
    const { code, message, ...place } = first;
    const more = problems.length > 1 ? ` (and ${problems.length - 1} more)` : '';
    const error = new DsdError(code, message + more, place);
    error.problems = problems;
    return error;
  }
}

/** A problem as reports hold it: code, message, and the place's fields. */
export function problem(code, message, place = {}) {
  return { code, message, ...place };
}

export function describePlace(place) {
  return ['where', 'label', 'section', 'page', 'path', 'tensor', 'chunk', 'block']
    .filter((name) => place[name] !== undefined)
    .map((name) => (name === 'where' ? place.where : `${name} ${place[name]}`))
    .join(', ');
}

/** Run `check`; what it throws as a DsdError goes to `problems`. Returns its result, or undefined. */
export function collect(problems, check) {
  try {
    return check();
  } catch (error) {
    if (!(error instanceof DsdError)) throw error;
    problems.push(...error.problems);
    return undefined;
  }
}
