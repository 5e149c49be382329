// The map of the embeddings: nearest image at the pointer, keyboard, zoom, choice of projection.
(() => {
  const root = document.getElementById("map");
  if (!root) return;
  const data = JSON.parse(document.getElementById("map-data").textContent);
  const { width, height } = data;
  const svg = root.querySelector(".map-frame svg");
  const points = [...svg.querySelectorAll(".points use")];
  const ring = svg.querySelector(".ring");
  const frame = svg.querySelector(".drag");
  const tip = root.querySelector(".map-tip");
  const tile = tip.querySelector(".tile");
  const words = tip.querySelector(".words");
  let projection = Object.keys(data.places)[0];
  let view = { x: 0, y: 0, scale: 1 }; // of the drawing: shown = (place - corner) * scale
  let chosen = -1;

  const place = (i) => {
    const all = data.places[projection];
    return [(all[2 * i] - view.x) * view.scale, (all[2 * i + 1] - view.y) * view.scale];
  };
  const inside = ([x, y]) => x >= 0 && y >= 0 && x <= width && y <= height;

  /** Matrix from the drawing to the window; the drawing may have empty margins. */
  const matrix = () => svg.getScreenCTM();

  function draw() {
    const grown = Math.max(0.7, Math.min(1.6, 1 / (matrix()?.a || 1))).toFixed(2); // small screens
    points.forEach((point, i) => {
      const [x, y] = place(i);
      point.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)}) scale(${grown})`);
      point.style.display = inside([x, y]) ? "" : "none";
    });
    const [across, up] = data.axes[projection];
    root.querySelector(".across").textContent = across;
    root.querySelector(".up").textContent = up;
    choose(chosen >= 0 && inside(place(chosen)) ? chosen : -1);
  }

  function choose(i) {
    chosen = i;
    tip.hidden = i < 0;
    ring.setAttribute("visibility", i < 0 ? "hidden" : "visible");
    if (i < 0) return;
    const [x, y] = place(i);
    ring.setAttribute("cx", x);
    ring.setAttribute("cy", y);
    const [left, top, w, h] = data.tiles[i];
    tile.style.width = `${w}px`;
    tile.style.height = `${h}px`;
    tile.style.backgroundPosition = `-${left}px -${top}px`;
    words.replaceChildren();
    for (const [kind, text] of [["label", data.labels[i]], ["name", data.names[i]]]) {
      if (!text) continue;
      const line = document.createElement("span");
      line.className = kind;
      line.textContent = text;
      words.append(line);
    }
    // beside the point, on the side where there is room
    const box = svg.getBoundingClientRect();
    const spot = new DOMPoint(x, y).matrixTransform(matrix());
    const [u, v] = [spot.x - box.left, spot.y - box.top];
    const room = [u + 14, v + 14];
    if (room[0] + tip.offsetWidth > box.width) room[0] = u - 14 - tip.offsetWidth;
    if (room[1] + tip.offsetHeight > box.height) room[1] = v - 14 - tip.offsetHeight;
    tip.style.left = `${Math.max(0, Math.min(room[0], box.width - tip.offsetWidth))}px`;
    tip.style.top = `${Math.max(0, room[1])}px`;
  }

  const at = (event) => {
    const spot = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix().inverse());
    return [spot.x, spot.y];
  };

  /** The shown point of lowest cost; -1 if none has a finite one. */
  function best(cost) {
    let found = -1;
    let least = Infinity;
    points.forEach((point, i) => {
      if (point.classList.contains("dim")) return;
      const where = place(i);
      if (!inside(where)) return;
      const price = cost(where, i);
      if (price < least) [found, least] = [i, price];
    });
    return found;
  }

  function nearest([x, y], reach) {
    return best(([px, py]) => {
      const distance = Math.hypot(px - x, py - y);
      return distance <= reach ? distance : Infinity;
    });
  }

  function zoom(factor, [x, y]) {
    const scale = factor === 0 ? 1 : Math.max(1, Math.min(60, view.scale * factor));
    if (scale === 1) view = { x: 0, y: 0, scale };
    else {
      const [u, v] = [view.x + x / view.scale, view.y + y / view.scale];
      view = { x: u - x / scale, y: v - y / scale, scale };
    }
    draw();
  }

  let from = null; // where a drag of the mouse began
  svg.addEventListener("pointermove", (event) => {
    const here = at(event);
    if (!from) {
      if (event.pointerType === "mouse") choose(nearest(here, 24));
      return;
    }
    const corner = [Math.min(from[0], here[0]), Math.min(from[1], here[1])];
    const size = [Math.abs(from[0] - here[0]), Math.abs(from[1] - here[1])];
    for (const [name, value] of Object.entries({
      x: corner[0], y: corner[1], width: size[0], height: size[1],
    })) frame.setAttribute(name, value);
    frame.setAttribute("visibility", "visible");
  });
  svg.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "mouse" || event.button) return;
    from = at(event);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointerup", (event) => {
    frame.setAttribute("visibility", "hidden");
    const here = at(event);
    if (!from) {
      choose(nearest(here, 40)); // a finger is wide
      return;
    }
    const size = [Math.abs(from[0] - here[0]), Math.abs(from[1] - here[1])];
    if (Math.max(...size) > 8) {
      const factor = Math.min(width / Math.max(size[0], 1), height / Math.max(size[1], 1));
      const scale = Math.min(60, view.scale * factor);
      const middle = [(from[0] + here[0]) / 2, (from[1] + here[1]) / 2];
      view = {
        x: view.x + middle[0] / view.scale - width / 2 / scale,
        y: view.y + middle[1] / view.scale - height / 2 / scale,
        scale,
      };
      draw();
    } else choose(nearest(here, 24));
    from = null;
  });
  svg.addEventListener("pointercancel", () => {
    from = null;
    frame.setAttribute("visibility", "hidden");
  });
  svg.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse" && !from) choose(-1);
  });
  svg.addEventListener("dblclick", () => zoom(0, [0, 0]));

  const directions = {
    ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1],
  };
  svg.addEventListener("keydown", (event) => {
    const middle = chosen < 0 ? [width / 2, height / 2] : place(chosen);
    if (event.key === "Escape") choose(-1);
    else if (event.key === "+" || event.key === "=") zoom(1.5, middle);
    else if (event.key === "-") zoom(1 / 1.5, middle);
    else if (event.key === "0") zoom(0, middle);
    else if (directions[event.key]) {
      const [dx, dy] = directions[event.key];
      const next = chosen < 0
        ? nearest(middle, Infinity)
        : best(([px, py], i) => {
            const along = (px - middle[0]) * dx + (py - middle[1]) * dy;
            const across = Math.abs((px - middle[0]) * dy) + Math.abs((py - middle[1]) * dx);
            return i !== chosen && along > 0 && across <= 2 * along ? along + 2 * across : Infinity;
          });
      if (next >= 0) choose(next);
    } else return;
    event.preventDefault();
  });

  root.querySelectorAll("[data-zoom]").forEach((button) =>
    button.addEventListener("click", () =>
      zoom(Number(button.dataset.zoom), chosen < 0 ? [width / 2, height / 2] : place(chosen))));

  const buttons = [...root.querySelectorAll("[data-projection]")];
  buttons.forEach((button) =>
    button.addEventListener("click", () => {
      projection = button.dataset.projection;
      buttons.forEach((other) => other.setAttribute("aria-pressed", other === button));
      view = { x: 0, y: 0, scale: 1 };
      draw();
    }));

  window.addEventListener("resize", draw);
  draw();

  const keys = [...root.querySelectorAll(".key")];
  keys.forEach((key) =>
    key.addEventListener("click", () => {
      const on = key.getAttribute("aria-pressed") !== "true";
      key.setAttribute("aria-pressed", on);
      const lit = new Set(
        keys.filter((k) => k.getAttribute("aria-pressed") === "true").map((k) => k.dataset.kind));
      points.forEach((point) => {
        const kind = `${point.getAttribute("class").split(" ")[0]} ${point.getAttribute("href")}`;
        point.classList.toggle("dim", lit.size > 0 && !lit.has(kind));
      });
      choose(-1);
    }));
})();
