"use strict";
// Draws the token strips from the embedded data. Every text goes in as textContent.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const by = (id) => document.getElementById(id);
  const card = by("card");
  const list = by("strips");
  const STEPS = [0.05, 0.1, 0.2, 0.4]; // nats
  const SIZES = [2, 5, 17, 65]; // ids
  let pinned = false;
  let current = null;

  const make = (name, className, text) => {
    const node = document.createElement(name);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const number = (value, digits) => {
    if (value === null || value === undefined) return "–";
    if (value === "-inf") return "−∞";
    if (value === "inf") return "∞";
    return value.toFixed(digits).replace("-", "−");
  };
  const small = (value) => {
    if (typeof value !== "number") return number(value);
    return Math.abs(value) >= 0.001 || value === 0 ? number(value, 4) : value.toExponential(1).replace("-", "−");
  };
  const textOf = (id) => (data.texts[id] === undefined ? `#${id}` : data.texts[id]);
  const isOutside = (id) => id < 0 || (data.vocab_size !== null && id >= data.vocab_size);
  const level = (value, steps) => steps.filter((step) => value >= step).length;

  const shade = (rollout, i, mode) => {
    if (mode === "size") {
      const size = rollout.support_size[i];
      const step = size === null ? 0 : level(size, SIZES);
      return step ? `p${step}` : "";
    }
    const ratio = rollout.log_ratio[i];
    if (typeof ratio !== "number") return "";
    const step = level(Math.abs(ratio), STEPS);
    return step ? `${ratio > 0 ? "p" : "n"}${step}` : "";
  };
  const paint = (token, rollout, i) => {
    const classes = ["t", shade(rollout, i, by("colour").value)];
    if (rollout.support_size[i] === null) classes.push("forced");
    else if (rollout.finding[i] || typeof rollout.log_ratio[i] !== "number") classes.push("fault");
    if (isOutside(rollout.ids[i])) classes.push("outside");
    if (token === current) classes.push("current");
    token.className = classes.filter(Boolean).join(" ");
  };

  const strips = data.rollouts.map((rollout, index) => {
    const box = make("article", "rollout");
    const head = make("p", "about");
    head.append(make("h3", "", rollout.id));
    head.append(make("span", "tag", rollout.why === "worst" ? "among the worst" : "sample"));
    if (rollout.faults) head.append(make("span", "tag fault", `${rollout.faults} token${rollout.faults === 1 ? "" : "s"} with a finding or without a score`));
    if (rollout.prompt_outside.length) head.append(make("span", "tag fault", `prompt holds ids outside the vocabulary: ${rollout.prompt_outside.join(", ")}`));
    const facts = [
      `${rollout.length} tokens`,
      rollout.mean === null ? "not scored" : `mean |log_ratio| ${small(rollout.mean)} nats`,
      `temperature ${rollout.temperature}`,
      `ended by ${rollout.finish}`,
    ];
    if (rollout.reward !== null) facts.push(`reward ${rollout.reward}`);
    if (rollout.versions.length) facts.push(`weights ${rollout.versions.join(", ")}`);
    head.append(facts.join(" · "));
    box.append(head);
    if (rollout.prompt !== null) {
      const fold = make("details");
      fold.append(make("summary", "", `Prompt, ${rollout.prompt_tokens} tokens`), make("div", "prompt", rollout.prompt));
      box.append(fold);
    }
    const strip = make("div", "strip");
    strip.setAttribute("role", "group");
    strip.setAttribute("aria-label", `Tokens of rollout ${rollout.id}`);
    const tokens = rollout.ids.map((id, i) => {
      const text = textOf(id);
      const token = make("span", "t", text);
      token.dataset.i = i;
      token.tabIndex = i === 0 ? 0 : -1;
      token.setAttribute("aria-describedby", "card");
      strip.append(token);
      if (text.includes("⏎")) strip.append("\n");
      return token;
    });
    box.append(strip);
    const end = rollout.start + rollout.ids.length;
    if (rollout.ids.length < rollout.length) {
      box.append(make("p", "window", `tokens ${rollout.start} to ${end - 1} of ${rollout.length}, around the worst one`));
    }
    strip.dataset.index = index;
    return { rollout, box, strip, tokens, order: index };
  });

  const row = (cells, className, kind = "td") => {
    const line = make("tr", className);
    cells.forEach((cell, i) => {
      const node = cell instanceof Node ? cell : make(kind, i ? "n" : "", cell);
      if (kind === "th") node.scope = "col";
      line.append(node);
    });
    return line;
  };
  const key = (side) => {
    const head = make("th", "n");
    head.append(make("i", side), side);
    return head;
  };
  const fill = (rollout, i) => {
    card.replaceChildren();
    const id = rollout.ids[i];
    card.append(make("span", "token", textOf(id)));
    const size = rollout.support_size[i];
    const place = `id ${id} · position ${rollout.start + i}`;
    if (size === null) {
      card.append(make("p", "", `${place} · forced: not sampled, not scored`));
      return;
    }
    card.append(make("p", "", `${place} · support of ${size} id${size === 1 ? "" : "s"}`));
    if (isOutside(id)) card.append(make("p", "fault", `outside the policy's vocabulary${data.vocab_size === null ? "" : ` of ${data.vocab_size} ids`}`));
    if (rollout.finding[i]) card.append(make("p", "fault", `finding ${rollout.finding[i]}`));
    const [engine, trainer] = [rollout.sampling_logprobs[i], rollout.replay_logprobs[i]];
    const [engineFull, trainerFull] = [rollout.full_logprobs[i], rollout.replay_full_logprobs[i]];
    const gap = typeof engineFull === "number" && typeof trainerFull === "number" ? trainerFull - engineFull : null;
    const scores = make("table", "scores");
    scores.append(row(["logprob, nats", "engine", "trainer", "difference"], "", "th"));
    scores.append(row(["over the support", number(engine, 4), number(trainer, 4), small(rollout.log_ratio[i])]));
    scores.append(row(["whole vocabulary", number(engineFull, 4), number(trainerFull, 4), small(gap)]));
    card.append(scores);
    const support = make("table", "support");
    support.append(row(["support", key("engine"), key("trainer"), ""], "", "th"));
    for (const [other, p, q] of rollout.supports[i]) {
      const name = make("td", isOutside(other) ? "text outside" : "text", textOf(other));
      const bars = make("td", "pair");
      [[p, "engine"], [q, "trainer"]].forEach(([value, series]) => {
        const bar = make("i", series);
        bar.style.width = `${Math.round(100 * (value || 0))}%`;
        bars.append(bar);
      });
      support.append(row([name, number(p, 4), number(q, 4), bars], other === id ? "sampled" : ""));
    }
    card.append(support);
    const left = size - rollout.supports[i].length;
    if (left > 0) card.append(make("p", "", `and ${left} less likely id${left === 1 ? "" : "s"}`));
  };
  const place = (token) => {
    const at = token.getClientRects()[0] || token.getBoundingClientRect();
    card.hidden = false;
    const below = window.innerHeight - at.bottom;
    const up = below < card.offsetHeight + 12 && at.top > below;
    const top = up ? at.top - card.offsetHeight - 8 : at.bottom + 8;
    const left = Math.min(at.left, document.documentElement.clientWidth - card.offsetWidth - 8);
    card.style.top = `${top + window.scrollY}px`;
    card.style.left = `${Math.max(8, left) + window.scrollX}px`;
  };
  const found = (token) => {
    const strip = strips[Number(token.parentNode.dataset.index)];
    return [strip, Number(token.dataset.i)];
  };
  const mark = (token) => {
    const old = current;
    current = token;
    for (const node of [old, token]) {
      if (node) {
        const [strip, i] = found(node);
        paint(node, strip.rollout, i);
      }
    }
  };
  const open = (token) => {
    const [strip, i] = found(token);
    mark(token);
    fill(strip.rollout, i);
    place(token);
  };
  const close = () => {
    pinned = false;
    card.hidden = true;
    mark(null);
  };
  const focus = (token) => {
    const [strip] = found(token);
    for (const other of strip.tokens) other.tabIndex = other === token ? 0 : -1;
    token.focus();
  };

  list.addEventListener("mouseover", (event) => {
    if (!pinned && event.target.dataset.i !== undefined) open(event.target);
  });
  list.addEventListener("mouseout", (event) => {
    if (!pinned && event.target.dataset.i !== undefined && event.target !== document.activeElement) close();
  });
  list.addEventListener("focusin", (event) => {
    if (event.target.dataset.i !== undefined) open(event.target);
  });
  list.addEventListener("focusout", () => {
    if (!pinned) close();
  });
  list.addEventListener("click", (event) => {
    if (event.target.dataset.i === undefined) return;
    const again = pinned && event.target === current;
    focus(event.target);
    open(event.target);
    pinned = !again;
  });
  list.addEventListener("keydown", (event) => {
    if (event.target.dataset.i === undefined) return;
    const [strip, i] = found(event.target);
    const last = strip.tokens.length - 1;
    const next = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: last }[event.key];
    if (next !== undefined) {
      event.preventDefault();
      focus(strip.tokens[Math.max(0, Math.min(last, next))]);
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      pinned = !pinned;
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
  });
  document.addEventListener("click", (event) => {
    if (pinned && !card.contains(event.target) && event.target.dataset.i === undefined && !event.target.dataset.strip) close();
  });

  const legend = () => {
    const mode = by("colour").value;
    const entries =
      mode === "size"
        ? [["", "1 id"], ["p1", "2 to 4"], ["p2", "5 to 16"], ["p3", "17 to 64"], ["p4", "65 and more"]]
        : [
            ["n4", "trainer lower by 0.4 nats and more"], ["n3", "0.2"], ["n2", "0.1"], ["n1", "0.05"],
            ["", "within 0.05"],
            ["p1", "0.05"], ["p2", "0.1"], ["p3", "0.2"], ["p4", "trainer higher by 0.4 nats and more"],
          ];
    by("scale").replaceChildren(
      ...entries.map(([className, words]) => {
        const key = make("span", "key");
        key.append(make("i", `t ${className}`), words);
        return key;
      }),
    );
  };
  const colour = () => {
    for (const strip of strips) strip.tokens.forEach((token, i) => paint(token, strip.rollout, i));
    legend();
  };
  const ORDERS = {
    given: (a, b) => a.order - b.order,
    id: (a, b) => a.rollout.id.localeCompare(b.rollout.id, "en", { numeric: true }),
    length: (a, b) => b.rollout.length - a.rollout.length || a.order - b.order,
  };
  const arrange = () => {
    close();
    const show = by("show").value;
    const search = by("search").value;
    const chosen = strips.filter(
      ({ rollout }) =>
        (!show || (show === "faults" ? rollout.faults > 0 : rollout.why === show)) && rollout.id.includes(search),
    );
    chosen.sort(ORDERS[by("order").value]);
    list.replaceChildren(...chosen.map((strip) => strip.box));
    by("count").textContent = `${chosen.length} of ${strips.length} shown`;
  };
  for (const id of ["show", "order"]) by(id).addEventListener("change", arrange);
  by("search").addEventListener("input", arrange);
  by("colour").addEventListener("change", colour);
  by("controls").addEventListener("submit", (event) => event.preventDefault());

  const table = by("worst-tokens");
  const body = table.tBodies[0];
  table.querySelectorAll("thead th").forEach((head, column) => {
    if (!head.dataset.kind) return;
    const button = make("button", "", head.textContent);
    button.type = "button";
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") === "descending";
      const numeric = head.dataset.kind === "number";
      const value = (line) => line.cells[column].dataset.value;
      const compare = (a, b) =>
        numeric ? Number(value(a)) - Number(value(b)) : value(a).localeCompare(value(b), "en", { numeric: true });
      const lines = [...body.rows].sort((a, b) => (up ? compare(a, b) : compare(b, a)));
      table.querySelectorAll("th[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      body.replaceChildren(...lines);
    });
  });
  table.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-strip]");
    if (!link) return;
    event.preventDefault();
    by("show").value = "";
    by("search").value = "";
    arrange();
    const strip = strips[Number(link.dataset.strip)];
    const token = strip.tokens[Number(link.dataset.position) - strip.rollout.start];
    strip.box.scrollIntoView({ block: "start", behavior: "instant" });
    token.scrollIntoView({ block: "center", behavior: "instant" });
    focus(token);
    pinned = true;
  });

  by("controls").hidden = false;
  by("scale").hidden = false;
  colour();
  arrange();
})();
