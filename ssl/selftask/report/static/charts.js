"use strict";
// Draws the charts of `report/charts.py` with uPlot. selftask.charts[id] is the group of an element.
(() => {
  const HEIGHT = 210;
  const NUM_COLORS = 8;
  const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];
  const NEAR_PX = 6; // of a mark
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colorOf = (number) => css(`--c${number % NUM_COLORS}`);
  const isNumber = (value) => value !== null && value !== undefined;

  function showSeconds(value) {
    const size = Math.abs(value);
    if (size === 0) return "0 s";
    if (size < 1e-3) return `${+(value * 1e6).toPrecision(3)} µs`;
    if (size < 1) return `${+(value * 1e3).toPrecision(3)} ms`;
    if (size < 180) return `${+value.toPrecision(3)} s`;
    if (size < 3 * 3600) return `${+(value / 60).toPrecision(3)} min`;
    return `${+(value / 3600).toPrecision(3)} h`;
  }
  function showBytes(value) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let number = 0;
    for (; Math.abs(value) >= 1024 && number < 4; number++) value /= 1024;
    return `${+value.toPrecision(3)} ${units[number]}`;
  }
  function showNumber(value) {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
    return size >= 1000 ? Math.round(value).toLocaleString("en") : `${+value.toPrecision(4)}`;
  }
  const FORMATS = {
    number: showNumber,
    percent: (value) => `${+(100 * value).toPrecision(3)} %`,
    bytes: showBytes,
    seconds: showSeconds,
  };
  const X_FORMATS = { steps: (x) => x.toLocaleString("en"), epochs: (x) => `${+x.toPrecision(4)}`, seconds: showSeconds };
  const X_LABELS = { epochs: "epoch", seconds: "training time" };

  const POWERS = Array.from({ length: 60 }, (_, n) => 2 ** n);
  const DECIMALS = Array.from({ length: 9 }, (_, n) => [1, 2, 5].map((digit) => digit * 10 ** (n - 9))).flat();
  const WHOLE = Array.from({ length: 12 }, (_, n) => [1, 2, 5].map((digit) => digit * 10 ** n)).flat();
  const CLOCK = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 18000, 36000, 72000, 180000];
  const DAYS = [1, 2, 5, 10, 20, 50].map((days) => days * 86400);

  // Distances between the ticks of an axis that are round numbers in its units.
  function spacing(format) {
    if (format === "steps") return { incrs: WHOLE };
    if (format === "bytes") return { incrs: POWERS };
    return format === "seconds" ? { incrs: [...DECIMALS, ...CLOCK, ...DAYS] } : {};
  }

  // Linear interpolation; straight on beyond the ends.
  function interpolated(xs, ys, x) {
    if (xs.length < 2) return ys.length ? ys[0] : x;
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle;
      else high = middle;
    }
    return ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / (xs[high] - xs[low] || 1);
  }

  // Exponential moving average without the bias of its start.
  function smoothed(values, weight) {
    let sum = 0, total = 0;
    return values.map((value) => {
      if (!isNumber(value)) return value;
      sum = weight * sum + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return sum / total;
    });
  }

  class Group {
    constructor(element, data) {
      this.element = element;
      this.id = element.dataset.charts;
      this.controls = element.querySelector(".controls");
      this.figures = [...element.querySelectorAll("figure")];
      this.hidden = new Set(); // titles and labels of curves that the reader has switched off
      this.plots = [];
      this.setData(data);
      const { x, smooth, log } = this.controls.elements;
      x.addEventListener("change", () => this.draw());
      log.addEventListener("change", () => this.draw());
      smooth.addEventListener("input", () => {
        this.controls.querySelector("output").textContent = smooth.value;
        cancelAnimationFrame(this.waiting);
        this.waiting = requestAnimationFrame(() => this.draw());
      });
      this.controls.addEventListener("submit", (event) => event.preventDefault());
      new ResizeObserver(() => this.resize()).observe(element);
    }

    // Take other data of the same charts, as of a run that goes on; zoom and choices stay.
    setData(data) {
      this.data = data;
      for (const name of ["epochs", "seconds"]) {
        const known = Object.values(data.clocks).some((clock) => clock[name].some(isNumber));
        this.controls.elements.x.querySelector(`[value=${name}]`).hidden = !known;
      }
      this.draw();
    }

    get unit() {
      return this.controls.elements.x.value;
    }

    // x of a step in the chosen unit
    place(step, clock) {
      const times = this.data.clocks[clock] || this.data.clocks[""];
      if (this.unit === "steps" || !times) return step;
      return interpolated(times.steps, times[this.unit], step);
    }

    draw() {
      const zoom = this.unit === this.drawnUnit ? this.zoom : null;
      this.drawnUnit = this.unit;
      this.zoom = zoom;
      this.plots.forEach((plot) => plot && plot.destroy());
      const xs = this.data.charts.flatMap((chart) =>
        chart.curves.flatMap((c) => (c.x.length ? [this.place(c.x[0], c.clock), this.place(c.x.at(-1), c.clock)] : []))
      );
      this.range = [Math.min(...xs), Math.max(...xs)];
      if (this.range[0] === this.range[1]) this.range = [this.range[0] - 0.5, this.range[1] + 0.5];
      this.zooming = true; // a new chart of a single point reports a range of its own
      this.plots = this.data.charts.map((chart, number) => this.plot(chart, this.figures[number]));
      queueMicrotask(() => {
        this.zooming = false;
        if (zoom) this.setZoom(zoom);
      });
    }

    plot(chart, figure) {
      const box = figure.querySelector(".plot");
      const weight = chart.smooth ? Number(this.controls.elements.smooth.value) : 0;
      const log = this.controls.elements.log.checked && this.isPositive(chart);
      const { series, tables } = this.series(chart, weight);
      const options = {
        width: box.clientWidth,
        height: HEIGHT,
        padding: [10, 12, 0, 0],
        series: [{ label: this.unit === "steps" ? this.data.x : X_LABELS[this.unit], value: (_, x) => (isNumber(x) ? X_FORMATS[this.unit](x) : "") }, ...series],
        scales: {
          x: { time: false, range: (u, low, high) => this.xRange(u, low, high) },
          y: { distr: log ? 3 : 1, range: (u, low, high) => this.yRange(chart, log, low, high) },
        },
        axes: this.axes(chart),
        cursor: {
          drag: { x: true, y: false, dist: 4 },
          sync: { key: this.id, scales: ["x", null] },
          dataIdx: nearestValue,
          focus: { prox: 24 },
          points: { size: 7 },
          bind: { dblclick: () => () => (this.setZoom(null), null) },
        },
        focus: { alpha: 0.4 },
        hooks: {
          draw: [(u) => this.drawLines(u, chart)],
          setScale: [(u, key) => key === "x" && this.zoomed(u)],
          setCursor: [(u) => this.pointed(u)],
          setSeries: [(u, number, change) => this.switched(u, chart, number, change)],
        },
      };
      const plot = new uPlot(options, uPlot.join(tables), box);
      plot.over.addEventListener("mouseleave", () => (selftask.tip(""), this.showLast()));
      for (const kind of ["touchstart", "touchmove"]) {
        plot.over.addEventListener(kind, (event) => touched(plot, event), { passive: true });
      }
      setTimeout(() => this.plots.includes(plot) && showLast(plot)); // uPlot clears the legend first
      return plot;
    }

    series(chart, weight) {
      const series = [], tables = [];
      const own = chart.curves.some((curve) => curve.color !== null);
      chart.curves.forEach((curve, number) => {
        const color = own ? curve.color || 0 : number;
        const xs = curve.x.map((step) => this.place(step, curve.clock));
        const made = {
          label: curve.label,
          stroke: colorOf(color),
          width: curve.thin ? 1 : 1.75,
          dash: own ? [] : DASHES[Math.floor(number / NUM_COLORS) % DASHES.length],
          points: { show: curve.x.length < 40 && !curve.thin, size: 5 },
          show: !this.hidden.has(`${chart.title}/${curve.label}`),
          value: (_, y) => (isNumber(y) ? FORMATS[chart.format](y) : "–"),
        };
        if (weight) {
          series.push({ ...made, class: "raw", alpha: 0.3, width: 1, points: { show: false } });
          tables.push([xs, curve.y]);
        }
        series.push({ ...made, pair: weight ? series.length : 0 });
        tables.push([xs, weight ? smoothed(curve.y, weight) : curve.y]);
      });
      return { series, tables };
    }

    axes(chart) {
      const shared = {
        stroke: css("--muted"),
        grid: { stroke: css("--grid"), width: 1 },
        ticks: { stroke: css("--grid"), width: 1, size: 4 },
        font: "12px system-ui, sans-serif",
      };
      const show = (format) => (_, values) => values.map((value) => (isNumber(value) ? format(value) : ""));
      return [
        { ...shared, ...spacing(this.unit), size: 34, space: 60, values: show(X_FORMATS[this.unit]) },
        { ...shared, ...spacing(chart.format), values: show(FORMATS[chart.format]), size: widthOfLabels, space: 32 },
      ];
    }

    isPositive(chart) {
      return chart.curves.every((curve) => curve.y.every((y) => !isNumber(y) || y > 0));
    }

    // uPlot asks with the limits of the data when it scales by itself, else with those wanted.
    xRange(plot, low, high) {
      const xs = plot.data[0];
      return xs.length < 2 || (low === xs[0] && high === xs.at(-1)) ? this.zoom || this.range : [low, high];
    }

    yRange(chart, log, low, high) {
      const values = [low, high, ...chart.lines.map((line) => line.value)].filter(isNumber);
      if (!values.length) return [0, 1];
      if (log) return [Math.min(low, ...values.filter((y) => y > 0)) / 1.15, Math.max(...values) * 1.15];
      let [least, most] = [Math.min(...values), Math.max(...values)];
      const pad = (most - least || Math.abs(most) || 1) * 0.06;
      if (chart.zero && least >= 0) return [0, most + pad];
      return [least >= 0 && least < pad ? 0 : least - pad, most + pad];
    }

    zoomed(plot) {
      const { min, max } = plot.scales.x;
      if (this.zooming || !isNumber(min)) return;
      const [low, high] = this.range;
      const whole = min <= low && max >= high;
      const zoom = whole ? null : [min, max];
      if (JSON.stringify(zoom) === JSON.stringify(this.zoom || null)) return;
      this.setZoom(zoom);
    }

    // Show a part [low, high] of the x axis in all charts, or all of it.
    setZoom(zoom) {
      this.zoom = zoom;
      this.zooming = true;
      const [min, max] = zoom || this.range;
      for (const plot of this.plots) plot.setScale("x", { min, max });
      queueMicrotask(() => (this.zooming = false));
    }

    switched(plot, chart, number, change) {
      if (number === null || number === undefined || !("show" in change)) return;
      const series = plot.series[number];
      const key = `${chart.title}/${series.label}`;
      series.show ? this.hidden.delete(key) : this.hidden.add(key);
      const raw = series.pair; // the index of the raw curve below a smoothed one
      if (raw && plot.series[raw].show !== series.show) plot.setSeries(raw, { show: series.show });
    }

    drawLines(plot, chart) {
      const { ctx, bbox } = plot;
      const pixels = devicePixelRatio;
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      ctx.font = `${11 * pixels}px system-ui, sans-serif`;
      ctx.lineWidth = pixels;
      for (const { label, value } of chart.lines) {
        const y = plot.valToPos(value, "y", true);
        ctx.strokeStyle = ctx.fillStyle = css("--line");
        ctx.setLineDash([5 * pixels, 4 * pixels]);
        stroke(ctx, bbox.left, y, bbox.left + bbox.width, y);
        const above = y - bbox.top > 18 * pixels;
        ctx.textAlign = "right";
        ctx.textBaseline = above ? "bottom" : "top";
        ctx.fillText(label, bbox.left + bbox.width - 4 * pixels, y + (above ? -3 : 3) * pixels);
      }
      ctx.setLineDash([2 * pixels, 3 * pixels]);
      for (const mark of this.data.marks) {
        const x = plot.valToPos(this.place(mark.step, ""), "x", true);
        ctx.strokeStyle = css(`--${mark.kind}`) || css("--muted");
        stroke(ctx, x, bbox.top, x, bbox.top + bbox.height);
      }
      ctx.restore();
    }

    pointed(plot) {
      if (!plot.over.matches(":hover")) return;
      const { left } = plot.cursor;
      const close = this.data.marks.filter(
        (mark) => Math.abs(plot.valToPos(this.place(mark.step, ""), "x") - left) < NEAR_PX
      );
      const box = plot.over.getBoundingClientRect();
      const texts = close.slice(0, 4).map((mark) => `step ${mark.step.toLocaleString("en")}: ${mark.text}`);
      selftask.tip(texts.join("\n"), box.left + left, box.top + 8);
    }

    showLast() {
      setTimeout(() => this.plots.forEach(showLast));
    }

    resize() {
      this.plots.forEach((plot, number) => {
        const width = this.figures[number].querySelector(".plot").clientWidth;
        if (width && width !== plot.width) plot.setSize({ width, height: HEIGHT });
      });
    }
  }

  // Without a cursor the legend has the last value of each curve.
  function showLast(plot) {
    if (!plot.root.isConnected) return; // drawn anew meanwhile
    const last = plot.data[0].length - 1;
    const idxs = plot.series.map((_, number) => (number ? nearestValue(plot, number, last) : last));
    plot.setLegend({ idxs });
  }

  // Index of the value of a curve that is nearest: curves have steps of their own.
  function nearestValue(plot, number, index) {
    const values = plot.data[number];
    if (isNumber(values[index])) return index;
    for (let away = 1; away < values.length; away++) {
      if (isNumber(values[index - away])) return index - away;
      if (isNumber(values[index + away])) return index + away;
    }
    return index;
  }

  function touched(plot, event) {
    const box = plot.over.getBoundingClientRect();
    const [touch] = event.touches;
    plot.setCursor({ left: touch.clientX - box.left, top: touch.clientY - box.top });
  }

  function stroke(ctx, x0, y0, x1, y1) {
    ctx.beginPath();
    ctx.moveTo(x0, y0);
    ctx.lineTo(x1, y1);
    ctx.stroke();
  }

  function widthOfLabels(plot, values) {
    const longest = Math.max(0, ...(values || []).map((text) => text.length));
    return Math.max(44, 14 + 7 * longest);
  }

  selftask.charts = {};
  for (const element of document.querySelectorAll("[data-charts]")) {
    const data = JSON.parse(document.getElementById(element.dataset.charts).textContent);
    selftask.charts[element.dataset.charts] = new Group(element, data);
  }
  selftask.onTheme.push(() => Object.values(selftask.charts).forEach((group) => group.draw()));
})();
