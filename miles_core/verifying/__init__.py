"""For environments that judge what a model wrote. Plugins import this room; nothing else in the core does.

- `prompts`: a question becomes messages or one string;
- `extract`: where the answer stands in a text, and why there is none;
- `workers`: killable child processes that judge it, asked by `Pool.shared("acme_env.worker", settings, count)`;
- `sandbox`: the child's side. A module of the plugin, here `acme_env/worker.py`, ends in

      if __name__ == "__main__":
          given = json.loads(sys.argv[1])
          serve(start, given["deadline_s"], given["memory_mib"], given)

  where `start(settings)` loads what judging needs and returns the object whose methods are asked for.

This package itself imports nothing, and its modules nothing but the standard library, `errors`, `records` and
`config.schema`.
"""
