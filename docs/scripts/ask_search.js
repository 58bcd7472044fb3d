// Asks the search of a built site: node ask_search.js SITE, with one question per line of the input.
// Prints the address of the first page for each, as JSON. It runs the site's own search worker.
const fs = require("fs"), path = require("path"), vm = require("vm");

const site = process.argv[2];
const folder = path.join(site, "assets/javascripts/workers");
const file = fs.readdirSync(folder).find((name) => /^search\..*\.js$/.test(name));
let listener, answer;
const worker = vm.createContext({
  addEventListener: (event, callback) => { listener = callback; },
  postMessage: (message) => { answer(message); },
  console,
});
worker.self = worker;
vm.runInContext(fs.readFileSync(path.join(folder, file), "utf8"), worker);

function send(type, data) {
  return new Promise((resolve) => { answer = resolve; listener({ data: { type, data } }); });
}

async function main() {
  const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));
  await send(0, { config: index.config, docs: index.docs, options: {} });
  const first = {};
  for (const question of fs.readFileSync(0, "utf8").split("\n").filter(Boolean)) {
    const results = await send(2, question);
    const pages = results.data.items.map((group) => group[0].location.split("#")[0]);
    first[question] = pages[0] ?? null;
  }
  console.log(JSON.stringify(first));
}
main();
