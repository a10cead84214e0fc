#!/usr/bin/env node
// dsd_read <checkpoint> [--json] [--verify]: the root digest, and each tensor with its content digest.
// Exit 0: fine; 1: the checkpoint is bad; 2: usage; 3: the operating system reported an error.

import { Checkpoint, DsdError, toHex, verify } from './index.mjs';
import { NodeStorage } from './src/storage_node.mjs';
import { describePlace } from './src/errors.mjs';

const USAGE = 'usage: node dsd_read.mjs <checkpoint> [--json] [--verify]';
const FLAGS = ['--json', '--verify'];

function parseArguments(args) {
  const flags = new Set(args.filter((arg) => arg.startsWith('--')));
  const folders = args.filter((arg) => !arg.startsWith('--'));
  const isKnown = [...flags].every((flag) => FLAGS.includes(flag));
  if (!isKnown || folders.length !== 1) return null;
  return { folder: folders[0], json: flags.has('--json'), verify: flags.has('--verify') };
}

function printProblems(problems) {
  for (const { code, message, ...place } of problems) {
    console.error([code, describePlace(place), message].filter(Boolean).join(': '));
  }
}

/** What is printed; names are quoted as in JSON. */
async function describe(checkpoint) {
  const { tensors: digests, state } = await checkpoint.contentDigests();
  const tensors = checkpoint.tensors.map(({ name, dtype, shape }, i) => (
    { name: JSON.stringify(name), dtype, shape, content: toHex(digests[i]) }
  ));
  return { root: checkpoint.root, state: toHex(state), tensors };
}

// By hand: dims may exceed what a JavaScript number holds; JSON's integers need not.
function toJson({ root, state, tensors }) {
  const rows = tensors.map(({ name, dtype, shape, content }) => (
    `{"name":${name},"dtype":"${dtype}","shape":[${shape.join(',')}],"content":"${content}"}`
  ));
  return `{"root":"${root}","state":"${state}","tensors":[${rows.join(',\n')}]}`;
}

function toText({ root, state, tensors }) {
  const rows = tensors.map(({ name, dtype, shape, content }) => (
    `${content}  ${dtype} [${shape.join(', ')}]  ${name.slice(1, -1)}`
  ));
  return [`root  ${root}`, `state ${state}`, ...rows].join('\n');
}

async function main(options) {
  const storage = new NodeStorage(options.folder);
  try {
    if (options.verify) {
      const report = await verify(storage);
      printProblems(report.problems);
      for (const name of report.unlisted) console.error(`not listed: ${name}`);
      if (report.problems.length > 0) return 1;
    }
    const description = await describe(await Checkpoint.open(storage));
    console.log(options.json ? toJson(description) : toText(description));
    return 0;
  } catch (error) {
    if (!(error instanceof DsdError)) throw error;
    printProblems(error.problems);
    return error.code === 'io_error' ? 3 : 1;
  } finally {
    await storage.close();
  }
}

const options = parseArguments(process.argv.slice(2));
if (options === null) console.error(USAGE);
process.exitCode = options === null ? 2 : await main(options);
